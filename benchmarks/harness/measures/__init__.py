"""One module for each kind of measure: functions of a ``Bench``, a ``System`` and sizes that give figures by name."""
