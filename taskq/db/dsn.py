"""Where the database is: parsing a DSN strictly, describing it without secrets, explaining why it cannot be reached.

psycopg (libpq) and asyncpg read URLs by different rules, and both repeat parts of a password in the errors that they
raise for a malformed one. So taskq parses a DSN once, here, by the stricter reading, and hands each driver a form that
holds no surprise. Nothing in this module opens a connection, and no text that it returns contains the password.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import quote, unquote

from psycopg import ProgrammingError, conninfo, pq

from taskq.errors import ConfigurationError, DatabaseBusy, DatabaseUnavailable

__all__ = ["Dsn", "connection_error", "describe_dsn", "explain_connection_error", "parse_dsn", "redact"]

_SCHEMES = ("postgresql://", "postgres://")
_ENCODE_HINT = (
    "percent-encode special characters in the user name and the password "
    "(@ as %40, : as %3A, / as %2F, ? as %3F, # as %23, % as %25, [ as %5B, ] as %5D, a space as %20)"
)
# Connection parameters of libpq that asyncpg would send to the server as settings, which it refuses.
_LIBPQ_ONLY = frozenset(
    {
        "connect_timeout",
        "client_encoding",
        "channel_binding",
        "fallback_application_name",
        "gssdelegation",
        "gssencmode",
        "hostaddr",
        "keepalives",
        "keepalives_count",
        "keepalives_idle",
        "keepalives_interval",
        "load_balance_hosts",
        "max_protocol_version",
        "min_protocol_version",
        "passfile",
        "replication",
        "require_auth",
        "requirepeer",
        "requiressl",
        "service",
        "servicefile",
        "sslcertmode",
        "sslcompression",
        "sslkeylogfile",
        "sslnegotiation",
        "sslsni",
        "ssl_max_protocol_version",
        "tcp_user_timeout",
    }
)


@dataclass(frozen=True, slots=True)
class Dsn:
    """A parsed DSN. ``params`` maps libpq's parameter names to decoded values; ``repr`` and ``str`` hide them."""

    params: Mapping[str, str] = field(repr=False)

    @property
    def host(self) -> str:
        """Host name, list of names separated by commas, or socket folder; empty for libpq's default."""
        return self.params.get("host") or self.params.get("hostaddr") or os.environ.get("PGHOST", "")

    @property
    def port(self) -> str:
        """Port, or a list of ports separated by commas."""
        return self.params.get("port") or os.environ.get("PGPORT", "") or "5432"

    @property
    def user(self) -> str:
        """Role to log in as; empty for libpq's default."""
        return self.params.get("user") or os.environ.get("PGUSER", "")

    @property
    def dbname(self) -> str:
        """Database to connect to; like libpq, it defaults to the name of the user."""
        return self.params.get("dbname") or os.environ.get("PGDATABASE", "") or self.user

    @property
    def password(self) -> str | None:
        """The password, decoded, if the DSN has one."""
        return self.params.get("password") or None

    @property
    def conninfo(self) -> str:
        """The keyword form for psycopg. Contains the password: never print it."""
        return conninfo.make_conninfo(**self.params)

    @property
    def asyncpg_dsn(self) -> str:
        """A fully percent-encoded URL for asyncpg. Contains the password: never print it.

        Parameters that only libpq knows are left out; ``connect_timeout`` (seconds) is for the caller to pass on.
        """
        kept = {k: v for k, v in self.params.items() if k not in _LIBPQ_ONLY}
        if "host" not in kept and self.params.get("hostaddr"):
            kept["host"] = self.params["hostaddr"]
        return "postgresql://?" + "&".join(f"{k}={quote(v, safe='')}" for k, v in kept.items())

    def __str__(self) -> str:
        host = self.host or "(default)"
        return f'host "{host}", port {self.port}, database "{self.dbname or "(default)"}"'


def parse_dsn(dsn: str) -> Dsn:
    """Parse ``postgresql://user:password@host:port/database?parameter=value`` or libpq's ``host=... dbname=...``.

    Raises:
        ConfigurationError: the DSN is malformed; the message says what to change and shows no part of the DSN.
    """
    text = dsn.strip()
    if not text:
        raise ConfigurationError("the DSN is empty; give one such as postgresql://user@host:5432/database")
    if text.startswith(_SCHEMES):
        return Dsn(_parse_url(text))
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text):
        scheme = text.split("://", 1)[0]
        raise ConfigurationError(f'the DSN begins with "{scheme}://", which is not PostgreSQL\'s; use postgresql://')
    try:
        parsed = conninfo.conninfo_to_dict(text)
    except ProgrammingError:
        # libpq's own message quotes what it could not read, which may be a piece of the password.
        raise ConfigurationError(
            "the DSN is neither a URL (postgresql://user@host:5432/database) nor a list of key=value pairs that "
            "libpq can read; quote a value that has spaces, quotes or backslashes: password='it\\'s'"
        ) from None
    return Dsn({k: str(v) for k, v in parsed.items() if v is not None and v != ""})


def _parse_url(url: str) -> dict[str, str]:
    rest = url.split("://", 1)[1]
    odd = _odd_characters(rest)
    if odd:
        raise ConfigurationError(
            f"the DSN cannot be read without doubt because {odd}; {_ENCODE_HINT}; what follows the host is "
            "/database?parameter=value&parameter=value"
        )
    authority, _, tail = re.sub(r"([/?])", "\0\\1", rest, count=1).partition("\0")
    path, _, query = tail.partition("?")
    params: dict[str, str] = {}
    userinfo, at, hosts = authority.rpartition("@")
    if at:
        user, _, password = userinfo.partition(":")
        params |= {"user": unquote(user), "password": unquote(password)}
    params |= _parse_hosts(hosts)
    params["dbname"] = unquote(path.removeprefix("/"))
    known = {option.keyword.decode() for option in pq.Conninfo.get_defaults()}
    for pair in filter(None, query.split("&")):
        key, equals, value = pair.partition("=")
        key = "dbname" if key == "database" else unquote(key)
        if not equals or key not in known:
            raise ConfigurationError(
                "the part of the DSN after ? is not a list of connection parameters that libpq knows "
                f"(parameter=value, separated by &); if the ? or & belongs to the password, {_ENCODE_HINT}"
            )
        params[key] = unquote(value)
    if "\0" in "".join(params.values()):
        raise ConfigurationError("the DSN contains %00, which PostgreSQL cannot take in any value")
    return {k: v for k, v in params.items() if v}


def _odd_characters(rest: str) -> str | None:
    """Say what makes the URL ambiguous, naming the kind of character and never its surroundings."""
    authority = re.split(r"[/?]", rest, maxsplit=1)[0]
    path = rest[len(authority) :].partition("?")[0]
    query = rest[len(authority) + len(path) :]
    if re.search(r"\s", rest):
        return "it contains a space"
    if "#" in rest:
        return "it contains a #"
    if re.search(r"%(?![0-9A-Fa-f]{2})", rest):
        return "it contains a % that does not begin a percent-encoded character"
    if authority.count("@") > 1:
        return "it has more than one @ before the host"
    if "@" in path or path.count("/") > 1:
        return "there is a / or @ where the name of the database should be"
    if "@" in query and "@" not in authority and not re.match(r"\?[a-z_]+=", query):
        return "there is a ? before the @"
    if re.search(r"[\[\]]", authority.rpartition("@")[0]):
        return "there is a [ or ] before the host"
    return None


def _parse_hosts(hosts: str) -> dict[str, str]:
    names: list[str] = []
    ports: list[str] = []
    for item in hosts.split(","):
        match = re.fullmatch(r"(\[[0-9A-Fa-f:.%]+\]|[^:\[\]]*)(?::(\d*))?", item)
        if match is None or (match[2] and not 0 < int(match[2]) < 65536):
            raise ConfigurationError(
                "the host and port of the DSN cannot be read: after the @ comes host:port, with a port from 1 to "
                f"65535; {_ENCODE_HINT}"
            )
        names.append(unquote(match[1].strip("[]")))
        ports.append(match[2] or "")
    found = {"host": ",".join(names) if any(names) else "", "port": ",".join(ports) if any(ports) else ""}
    return {k: v for k, v in found.items() if v}


def describe_dsn(dsn: str | Dsn) -> str:
    """Host, port and database in one phrase, without any secret; safe to print for a DSN of any shape."""
    try:
        return str(parse_dsn(dsn) if isinstance(dsn, str) else dsn)
    except ConfigurationError:
        return "a DSN that cannot be read"


def redact(text: str, dsn: str | Dsn) -> str:
    """Replace the DSN and its password, raw or percent-encoded, by ``***`` wherever they stand in ``text``."""
    raw = [dsn] if isinstance(dsn, str) else []
    try:
        password = (parse_dsn(dsn) if isinstance(dsn, str) else dsn).password
    except ConfigurationError:
        # What cannot be parsed cannot be told apart: everything between the scheme and the last @ is secret.
        assert isinstance(dsn, str)
        password = dsn.partition("://")[2].rpartition("@")[0].partition(":")[2] or None
    for secret in (password, os.environ.get("PGPASSWORD")):
        if secret:
            raw += [secret, quote(secret, safe=""), quote(secret), repr(secret)[1:-1]]
    for secret in sorted(set(filter(None, raw)), key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


# What the server or the system says, by SQLSTATE where there is one, else by its words; what it means; what to do.
_CAUSES: tuple[tuple[str, str, str, str], ...] = (
    (
        "28P01|28000",
        r"password authentication failed|no password supplied|authentication failed",
        "the login was refused",
        "check the user name and the password (percent-encoded in a URL)",
    ),
    ("28000", r"no pg_hba\.conf entry", "the server does not let this client in", "add a line to its pg_hba.conf"),
    ("28000", r'role ".*" does not exist', "the role does not exist", "create it, or correct the user name"),
    ("3D000", r'database ".*" does not exist', "the database does not exist", "create it, or correct its name"),
    (
        "53300",
        r"too many (clients|connections)|remaining connection slots|no more connections allowed",
        "the server has no free connection",
        "raise max_connections, or lower the number of processes",
    ),
    (
        "57P03",
        r"starting up|shutting down|in recovery mode|not (yet )?accepting connections",
        "the server is starting or stopping",
        "try again in a moment",
    ),
    (
        "",
        r"could not translate host name|[Nn]ame or service not known|getaddrinfo|[Nn]odename nor servname|resolve host",
        "the host name is not known",
        "check the host in the DSN and the name service",
    ),
    (
        "",
        r"[Cc]onnection refused|[Cc]onnect call failed|No such file or directory",
        "nothing answers there",
        "check that the server runs and listens there, and the host and port in the DSN",
    ),
    (
        "",
        r"timeout expired|timed out|TimeoutError|connection timeout",
        "no answer in time",
        "check the network, the firewall, and the host and port in the DSN",
    ),
    ("", r"SSL|certificate", "no encrypted connection was agreed", "check sslmode and the certificates"),
)
_PASSING = ("53300", "57P03")
"""Causes that pass by themselves."""


def connection_error(exc: BaseException, dsn: str | Dsn) -> DatabaseUnavailable:
    """The error to raise for one of psycopg, of asyncpg or of the operating system that a connection failed with."""
    said = explain_connection_error(exc, dsn)
    passing = any(happened in said for states, _, happened, _ in _CAUSES if states in _PASSING)
    return (DatabaseBusy if passing else DatabaseUnavailable)(said)


def explain_connection_error(exc: BaseException, dsn: str | Dsn) -> str:
    """One line on why a connection failed: host, port, database, what happened, what to do. Never the password.

    Takes the errors of psycopg, of asyncpg and of the operating system alike.
    """
    said = " ".join(str(exc).split()) or type(exc).__name__
    sqlstate = getattr(exc, "sqlstate", None) or ""
    where = describe_dsn(dsn)
    if isinstance(exc, TimeoutError):
        said = f"TimeoutError {said}"
    # Words first: one SQLSTATE covers several causes, and psycopg has none for a failed connection.
    ordered = sorted(_CAUSES, key=lambda cause: not re.search(cause[1], said))
    for states, words, happened, cure in ordered:
        if re.search(words, said) or (sqlstate and sqlstate in states.split("|")):
            return f"cannot connect to PostgreSQL at {where}: {happened}; {cure}"
    told = redact(said, dsn)[:300]
    return f"cannot connect to PostgreSQL at {where}: {told}; check that the server runs and the DSN is right"
