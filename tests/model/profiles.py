"""The Hypothesis settings of these tests.

``TASKQ_PROPERTY_EXAMPLES``: draw so many new programs a test; without it the same few are drawn each time.
``TASKQ_PROPERTY_SHRINK=no``: report the first program that fails as it is. Making it small takes minutes.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

EXAMPLES = int(os.environ.get("TASKQ_PROPERTY_EXAMPLES") or 0)
PHASES = [Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink]


def profile(examples: int, steps: int = 1) -> settings:
    """Settings for a test that draws so many examples, of so many steps where it is a state machine."""
    return settings(
        max_examples=EXAMPLES or examples,
        derandomize=not EXAMPLES,
        deadline=None,
        print_blob=True,
        phases=PHASES[:3] if os.environ.get("TASKQ_PROPERTY_SHRINK") == "no" else PHASES,
        suppress_health_check=list(HealthCheck),
        stateful_step_count=steps,
    )
