"""DSNs: read alike for both drivers, described and explained without the password."""

from __future__ import annotations

import re
from urllib.parse import quote

import asyncpg
import psycopg
import pytest
from servers import Server

from taskq.db.dsn import describe_dsn, explain_connection_error, parse_dsn, redact
from taskq.errors import ConfigurationError

SECRET = "p@s:s/w?%^]#"
PIECES = ("p@s", "s/w", "%^]", "w?%")


@pytest.mark.parametrize(
    ("dsn", "expected"),
    [
        ("postgresql://u:p@h:5433/db", {"user": "u", "password": "p", "host": "h", "port": "5433", "dbname": "db"}),
        (f"postgresql://u:{quote(SECRET, safe='')}@h/db", {"user": "u", "password": SECRET, "host": "h",
         "dbname": "db"}),
        (f"postgres://u@h/db?password={quote(SECRET, safe='')}", {"user": "u", "password": SECRET, "host": "h",
         "dbname": "db"}),
        ("postgresql:///db?host=/var/run&port=1", {"dbname": "db", "host": "/var/run", "port": "1"}),
        ("postgresql://u@%2Fvar%2Frun/db", {"user": "u", "host": "/var/run", "dbname": "db"}),
        ("postgresql://a:1,b:2/db?target_session_attrs=read-write", {"host": "a,b", "port": "1,2", "dbname": "db",
         "target_session_attrs": "read-write"}),
        ("postgresql://[::1]:5432/db", {"host": "::1", "port": "5432", "dbname": "db"}),
        ("postgresql://u:a:b^c!$&'()*+,;=@h/d%20b?application_name=a@b", {"user": "u", "password": "a:b^c!$&'()*+,;=",
         "host": "h", "dbname": "d b", "application_name": "a@b"}),
        ("host=h password='a b' dbname=db", {"host": "h", "password": "a b", "dbname": "db"}),
        ("postgresql://", {}),
    ],
)  # fmt: skip
def test_a_dsn_is_read_as_libpq_reads_it(dsn: str, expected: dict[str, str]) -> None:
    parsed = parse_dsn(dsn)
    assert dict(parsed.params) == expected
    libpq = psycopg.conninfo.conninfo_to_dict(dsn)
    assert {k: v for k, v in libpq.items() if v} == expected
    assert psycopg.conninfo.conninfo_to_dict(parsed.conninfo) == expected


@pytest.mark.parametrize(
    "dsn",
    [
        f"postgresql://u:{SECRET}@h:5432/db",
        f"postgresql://u@h/db?password={SECRET}",
        f"postgresql://{SECRET}@h/db",
        "postgresql://u:p@s@h/db",
        "postgresql://u:p@s/w@h/db",
        "postgresql://u:p@s?w@h/db",
        "postgresql://u:s/w@h/db",
        "postgresql://u:w?%5E@h/db",
        "postgresql://u:w?x=p@s@h/db",
        "postgresql://u:%^]@h/db",
        "postgresql://u:a]b@h/db",
        "postgresql://u:p@s#w@h/db",
        "postgresql://u:p@s w@h/db",
        "postgresql://h:p@s:w/db",
        "postgresql://h/db?p@s=s/w",
        "postgresql://h/db?password=%^]",
        "host=h password=p@s w?% dbname",
        "mysql://u:p@s@h/db",
        "",
    ],
)
def test_a_doubtful_dsn_is_refused_in_one_line_without_its_secrets(dsn: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        parse_dsn(dsn)
    message = str(refused.value)
    assert "\n" not in message
    assert not any(piece in message for piece in (*PIECES, "w@h", "a]b"))
    assert refused.value.__cause__ is None
    assert refused.value.__suppress_context__ or refused.value.__context__ is None
    if dsn.startswith("postgresql://") and "@h" in dsn:
        assert "percent-encode" in message
    assert describe_dsn(dsn) == "a DSN that cannot be read"


def test_nothing_that_shows_a_dsn_shows_the_password() -> None:
    dsn = f"postgresql://u:{quote(SECRET, safe='')}@h:5433/db"
    parsed = parse_dsn(dsn)
    for text in (repr(parsed), str(parsed), describe_dsn(dsn), f"{parsed}"):
        assert not any(piece in text for piece in (SECRET, quote(SECRET, safe=""), *PIECES))
    assert describe_dsn(dsn) == 'host "h", port 5433, database "db"'
    told = redact(f"a {SECRET} b {quote(SECRET, safe='')} c {dsn}", dsn)
    assert not any(piece in told for piece in (SECRET, quote(SECRET, safe=""), *PIECES))


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("port=5432", "port=5433"), r'port 5433, database "postgres": nothing answers there'),
        (("/postgres?", "/nope?"), r'database "nope": the database does not exist'),
        (("taskq@", "nobody@"), r"the role does not exist"),
        (("taskq@/", "taskq@nohost.invalid/"), r'host "nohost\.invalid".*the host name is not known'),
    ],
)
async def test_both_drivers_failures_are_explained(pg_server: Server, change: tuple[str, str], words: str) -> None:
    dsn = pg_server.dsn().replace(*change)
    if "nohost" in dsn:
        dsn = dsn.partition("?")[0]
    dsn = dsn.replace("@", ":secret%40secret@")
    errors: list[BaseException] = []
    try:
        psycopg.connect(parse_dsn(dsn).conninfo)
    except psycopg.Error as exc:
        errors.append(exc)
    try:
        await asyncpg.connect(parse_dsn(dsn).asyncpg_dsn)
    except (OSError, asyncpg.PostgresError) as exc:
        errors.append(exc)
    assert len(errors) == 2
    for error in errors:
        line = explain_connection_error(error, dsn)
        assert re.search(words, line), line
        assert "\n" not in line
        assert "secret" not in line


@pytest.mark.anyio
async def test_a_parsed_dsn_connects_both_drivers(pg_server: Server) -> None:
    dsn = parse_dsn(pg_server.dsn() + "&application_name=a%40b%20c&connect_timeout=5")
    with psycopg.connect(dsn.conninfo) as conn:
        assert conn.execute("show application_name").fetchone() == ("a@b c",)
    aconn = await asyncpg.connect(dsn.asyncpg_dsn)
    assert await aconn.fetchval("show application_name") == "a@b c"
    await aconn.close()


def test_an_unknown_failure_is_told_in_one_redacted_line() -> None:
    dsn = "postgresql://u:hunter2@h/db"
    line = explain_connection_error(RuntimeError("odd\nthing hunter2"), dsn)
    assert "odd thing ***" in line
    assert 'host "h"' in line
    assert "no answer in time" in explain_connection_error(TimeoutError(), dsn)
