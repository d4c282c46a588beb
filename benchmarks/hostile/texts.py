"""Hostile inputs that are no file of a format: queries, keys, words, and what servers send."""

from __future__ import annotations

import gzip
import json
from typing import Any

from hypothesis import strategies as st

from benchmarks.hostile.mutations import TEXTS, Content, Format, damaged, documents

# All that is read of a server's pages, in one, and an event of each API.
PAGE: dict[str, Any] = {
    "data": [{"id": "m", "owned_by": "vllm", "root": "/m", "max_model_len": 64, "meta": {"size": 1}}],
    "version": "1",
    "model_path": "/m",
    "default_generation_settings": {"n_ctx": 64},
    "models": [{"name": "m", "size": 1, "details": {"family": "llama"}}],
}
EVENT: dict[str, Any] = {
    "content": " a",
    "tokens": [1],
    "stop": True,
    "timings": {"prompt_n": 1, "prompt_ms": 1.0},
    "response": "a",
    "done": True,
    "eval_count": 1,
    "eval_duration": 5,
    "choices": [{"text": "a", "delta": {"content": [{"text": "a"}]}, "token_ids": [1]}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 10**9},
}


KEY = "sk-0123456789abcdef"
# What a server sends, and what it then sends again and again.
_OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
_CHUNKED = _OK + b"Transfer-Encoding: chunked\r\n\r\n"
TRICKS = [
    (b"", b"\r\n"),
    (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    (b"", b"HTTP/1.1 103 x\r\nLink: </a>\r\n\r\n"),
    (b"HTTP/1.1 101 x\r\nUpgrade: x\r\n\r\n", b"x"),
    (b"HTTP/1.1 2", b"0"),
    (b"HTTP/1.1 200 ", b"x"),
    (b"HTTP/0.9", b""),
    (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\0"),
    (_OK, b"x: y\r\n"),
    (_OK + b"x: ", b"x"),
    (_OK + b"x: y\r\n", b" z\r\n"),
    (_OK + b"Set-Cookie: a=", b"b; a="),
    (_OK + b"\r\n", b" "),
    (_CHUNKED, b"1\r\n \r\n"),
    (_CHUNKED, b"1;" + b"x" * 999 + b"\r\n \r\n"),
    (_CHUNKED + b"1;", b"x"),
    (_CHUNKED + b"f" * 16 + b"\r\n", b" "),
    (_CHUNKED + b"-5\r\n", b" "),
    (_CHUNKED + b"2\r\n{}\r\n0\r\n", b"x: y\r\n"),
    (_CHUNKED + b"2\r\n{}\r\n0\r\nx: ", b"y"),
    (_OK + b"Content-Length: 2\r\n\r\n{}", _OK + b"Content-Length: 2\r\n\r\n{}"),
    (_OK + b"Content-Length: -1\r\n\r\n{}", b" "),
    (_OK + b"Content-Length: 2\r\nContent-Length: 999999999\r\n\r\n{}", b" "),
    (_OK + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}", b" "),
    *((_OK + b"Content-Encoding: %s\r\n\r\n" % kind, b"\0") for kind in (b"br", b"zstd", b"identity,gzip")),
    *(
        (b"HTTP/1.1 %d x\r\nLocation: %s\r\nContent-Length: 0\r\n\r\n" % (status, place), b"")
        for status in (301, 303, 307, 399)
        for place in (
            b"file:///etc/passwd",
            b"/v1/models",
            b"http://[::1]:1/",
            b"//x",
            b"x" * 190 + KEY.encode(),
        )
    ),
    (b"HTTP/1.1 204 x\r\n\r\n", b"x"),
    (b"HTTP/1.1 401 %s\r\n\r\n" % KEY.encode(), b""),
    (b"HTTP/1.1 500 x\r\nContent-Type: application/json\r\n\r\n", b'{"error":'),
    (_OK.replace(b"json", b"json; charset=utf-7") + b"\r\n+AHs-+AH0-", b""),
    (_OK.replace(b"application/json", b"text/event-stream") + b"\r\n", b": ping\n"),
    (_OK.replace(b"application/json", b"text/event-stream") + b"\r\n", b"data: {}\n\n"),
    (_OK.replace(b"application/json", b"text/event-stream") + b"\r\ndata: ", b"["),
    (_CHUNKED + b"6\r\ndata: \r\n", b"1\r\n \r\n"),
]


def servers() -> Format:
    """What a server sends to whatever is requested, what it sends `again` and again after it, and how: at
    once, slowly, or without closing the connection. It knows the key."""

    def sent(page: Any) -> bytes:
        return _OK + b"\r\n" + json.dumps(page).encode()

    packed = gzip.compress(bytes(64 << 20))
    bombs = [
        sent(PAGE).replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n", 1)[:-1] + packed,
        sent(PAGE).replace(b"\r\n\r\n", b"\r\nContent-Length: " + b"9" * 18 + b"\r\n\r\n", 1),
        *(sent(0)[:-1] + piece * (1 << 21) for piece in (b"[", b'{"a":', b"{},", b"1")),
        sent(0)[:-1] + b'{"data": [' + b"{}," * (1 << 21) + b"{}]}",
    ]
    pieces = [b"HTTP/1.1 100 x\r\n\r\n", b"Transfer-Encoding: chunked\r\n", b"ffffffff\r\n", b"1e999", b"NaN"]
    pages = [PAGE, EVENT, {"data": KEY}, {**PAGE, "version": KEY}, {"error": {"message": "x" * 190 + KEY}}]
    answer = documents(pages, sent) | damaged([sent(page) for page in pages], [*pieces, KEY.encode()])
    tricks = st.sampled_from(TRICKS) | st.tuples(
        damaged([head for head, _ in TRICKS]), st.sampled_from(TRICKS)
    )
    trick = tricks.map(lambda drawn: (drawn[0], drawn[1] if isinstance(drawn[1], bytes) else drawn[1][1]))
    whole = st.tuples(answer | st.sampled_from(bombs), st.sampled_from([b""] * 30 + [b"", b"x", b" ", b"\n"]))
    how = st.sampled_from([b"once"] * 30 + [b"slow", b"open"])

    def files(drawn: tuple[bytes, bytes], how: bytes) -> dict[str, Content]:
        return {"answer": drawn[0], "again": drawn[1], "how": how}

    return Format(files((sent(PAGE | EVENT), b""), b"once"), st.builds(files, whole | trick, how))


def keys() -> Format:
    """Values of the variable of an API key: any bytes but zero."""
    odd = [
        b"\n",
        b"\r\n",
        b"\0",
        b"\x1b[2J",
        b"\xff",
        b"\xe2\x80\xa8",
        b"\xc3\xa4",
        b" ",
        b"'",
        b'"',
        b"\\",
        b"%s",
        b"{0}",
    ]
    key = damaged([KEY.encode(), b"Bearer " + KEY.encode()], odd) | st.binary(max_size=64)
    return Format({"key": KEY.encode()}, key.map(lambda key: {"key": key.replace(b"\0", b"")}))


# Words that notify somebody, become a link, a formula or a command, or are no text, where they are shown.
ODD_WORDS = [
    *(text for text in TEXTS if len(text) < 1000),
    "@everyone",
    "https://evil.example/x",
    "www.evil.example",
    "<!--",
    "-->",
    "]]>",
    "</script>",
    "![x](y)",
    "|",
    "`",
    "\\",
    "\n=1",
    "\t",
    "\r",
    "\uff1d1",
    "\ufeff",
    "\u2028",
    "\ufffe",
    "\x85",
    "&#64;",
    "##[error]",
    "##teamcity[",
    "e\u0301",
    "\U000e0001",
]


def words() -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from(ODD_WORDS) | st.text(max_size=9), min_size=1, max_size=4).map("".join)


# Of persons, and forms of which an expression might take quadratic time.
PERSONS = [
    "/home/jane.doe/x.log",
    "/Users/JANE/a b",
    "~jane/x",
    "C:\\Users\\jane\\x",
    "file:///home/jane/x",
    "-I/home/jane/i",
    "jane@host.example",
    "serial number: ab-12345",
    "s/n 1",
    "hostname=jane-pc",
    "login name : jane",
    "00:11:22:33:44:55",
    "01234567-89ab-cdef-0123-456789abcdef",
    "https://jane:pw@x.example/?token=1",
    "/home/\u0130stanbul/x",
    "/home/stra\u00dfe/x",
    "/home/a\u0301b\u0301c/x",
    "/home/" * 9,
    "@" * 9,
    "://",
    "s/n ",
    "host name:",
    "\\\\?\\",
    "\n",
    " ",
]


def persons() -> st.SearchStrategy[str]:
    """Texts of up to 300,000 characters."""
    text = st.lists(st.sampled_from(PERSONS) | words(), min_size=1, max_size=9).map("".join)
    many = st.integers(0, 9000).map(lambda count: " ".join(f"/home/u{n}er/u{n - 1}er" for n in range(count)))
    return (
        st.builds(lambda text, times: (text * times)[:300_000], text, st.sampled_from([1, 1, 50, 9000]))
        | many
    )


# What writes, reads a file, goes on for ever or takes memory, and what is put around it.
QUERIES = [
    "select 1",
    "from repeats",
    "copy (select 1) to 'outside'",
    "copy cells to '.tmp/outside'",
    "insert into cells from cells returning *",
    "update cells set name = '' returning *",
    "delete from records returning *",
    "attach 'outside' as o",
    "install httpfs",
    "load 'evil'",
    "pragma database_list",
    "set memory_limit = '1TB'",
    "create table o as select 1",
    "export database 'outside'",
    "from read_text('/etc/passwd')",
    "from '/etc/passwd'",
    "from glob('/*')",
    "from query('copy cells to outside')",
    "from duckdb_settings()",
    "select getenv('HOME')",
    "merge into cells using repeats on true when matched then delete returning *",
    "truncate cells",
    "vacuum",
    "checkpoint",
    "call pragma_version()",
    "use memory",
    "pivot cells on name using count(*)",
    "summarize cells",
    "show tables",
    "from read_csv('/etc/passwd')",
    "from read_parquet('http://127.0.0.1:1/x')",
    "from sniff_csv('/etc/passwd')",
    "from parquet_metadata('x')",
    "from read_blob('*')",
    "from query_table(['cells'])",
    "from json_execute_serialized_sql('{}')",
    "from test_all_types()",
    "from duckdb_secrets()",
    "from duckdb_logs()",
    "select nextval('s')",
    "select currval('s'), txid_current(), current_setting('temp_directory')",
    "select set_config('a', 'b', false)",
    "select write_log('x')",
    "select getvariable('x')",
    "select random(), uuid(), now()",
    "select list_sort(range(100000000))",
    "select bitstring('1', 2000000000)",
    "select printf('%2000000000d', 1)",
    "select levenshtein(repeat('a', 200000), repeat('b', 200000))",
    "select regexp_matches(repeat('a', 100000), '(a+)+$')",
    "select map(range(10000000), range(10000000))",
    "select 'x' like repeat('%x', 100000)",
    "select struct_pack(a := chr(27) || '[31m')",
    'select 1 as "\x1b]0;x\x07"',
    "select * from range(1000000000000)",
    "select list(range) from range(1000000000)",
    "select string_agg(repeat('x', 100000), '') from range(1000000)",
    "select repeat(repeat('x', 1000000), 1000) from range(100)",
    "with recursive t(n) as (select 1 union all select n + 1 from t) from t",
    "with recursive t(s) as (select 'x' union all select s || s from t) select max(s) from t",
    "select pg_sleep(1000)",
    "select ('[' || repeat('[', 100000))::json",
    "select date '290000-01-01'",
    "values ('nan'::double), (1)",
]
AROUND = [
    "with x as ({}) from x",
    "with x as materialized ({}) select * from x, x as y",
    "select ({})",
    "select * from ({})",
    "select 1 where exists ({})",
    "({}) union all (select 1)",
    "select [({})]",
    "explain {}",
    "prepare p as {}",
    "{};{}",
    "/* {} */ {}",
    "describe {}",
]


def queries() -> st.SearchStrategy[bytes]:
    def around(outer: str, query: str) -> str:
        return outer.replace("{}", query)

    nested = st.recursive(
        st.sampled_from(QUERIES), lambda inner: st.builds(around, st.sampled_from(AROUND), inner)
    )
    texts = [query.encode() for query in QUERIES]
    return nested.map(str.encode) | damaged(texts, [b"(", b"'", b"\xff", b";"])
