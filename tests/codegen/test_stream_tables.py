"""Tables of codes become bytes without a sign, whose sums are close to those of the entries."""

from __future__ import annotations

import math
import random

import pytest

from mirage_hf.codegen.streams.tables import (
    OFFSET,
    TableBytes,
    table_bytes,
    table_halves,
    words,
)
from mirage_hf.formats.bitsandbytes import TABLES
from mirage_hf.ops.dtypes import E2M1


def entries(table: TableBytes) -> list[float]:
    """Return what the bytes of a table stand for."""
    signs = [-1 if n // 8 == table.negative else 1 for n in range(16)]
    numbers = [
        sum(b * 128**n for n, b in enumerate(reversed(e))) for e in zip(*table.planes, strict=True)
    ]
    return [sign * n * table.unit for sign, n in zip(signs, numbers, strict=True)]


def random_table(seed: int) -> tuple[float, ...]:
    """Return a table of normal floats that spread over some powers of two."""
    r = random.Random(seed)
    spread = r.choice((1, 3, 6))
    sizes = [2.0 ** r.uniform(-spread, 0) * r.choice((0, 1, 1, 1)) for _ in range(15)]
    first = r.choice((-1, 1))
    values = [*(first * x for x in sizes[:8]), *(-first * x for x in (*sizes[8:], 1.0))]
    return tuple(2.0 ** r.randint(-20, 20) * x for x in values)


def test_small_floats_have_one_byte_and_are_exact() -> None:
    table = table_bytes(E2M1)
    assert table is not None and len(table.planes) == 1
    assert (table.shift, table.factor, table.negative) == (1, 1.0, 1)
    assert entries(table) == list(E2M1)
    assert words(table.planes[0]) == 2 * (0x03020100, 0x0C080604)


@pytest.mark.parametrize("name", TABLES)
def test_tables_of_bitsandbytes_are_closer_than_in_float16(name: str) -> None:
    table = table_bytes(TABLES[name])
    assert table is not None and len(table.planes) == 2
    assert entries(table) == pytest.approx(TABLES[name], rel=2.0**-13)


@pytest.mark.parametrize("seed", range(40))
def test_bytes_are_close_to_the_entries(seed: int) -> None:
    values = random_table(seed)
    table = table_bytes(values)
    assert table is not None
    assert all(0 <= byte < 128 for plane in table.planes for byte in plane)
    largest = max(map(abs, values))
    assert entries(table) == pytest.approx(values, rel=0, abs=largest * 2.0**-14)
    assert table.factor * 2.0**-table.shift == table.unit and 0 <= table.shift <= 4


@pytest.mark.parametrize("seed", range(40))
def test_halves_are_close_to_the_entries(seed: int) -> None:
    values = random_table(seed)
    values = tuple(values[-n] for n in range(16))  # no half has a sign
    table = table_halves(values)
    assert table is not None
    assert all(0 <= byte < 128 for plane in table.planes for byte in plane)
    largest = max(map(abs, values))
    found = [(h + low / 128 - OFFSET) * table.unit for h, low in zip(*table.planes, strict=True)]
    assert found == pytest.approx(values, rel=0, abs=largest * 2.0**-13)


@pytest.mark.parametrize("values", [*TABLES.values(), E2M1])
def test_halves_of_known_tables_are_closer_than_in_bfloat16(values: tuple[float, ...]) -> None:
    table = table_halves(values)
    assert table is not None
    found = [(h + low / 128 - OFFSET) * table.unit for h, low in zip(*table.planes, strict=True)]
    assert found == pytest.approx(values, rel=2.0**-12)


def test_words_hold_bytes_in_order() -> None:
    assert [n.to_bytes(4, "little") for n in words(range(8))] == [
        bytes(range(4)),
        bytes(range(4, 8)),
    ]


@pytest.mark.parametrize(
    "values",
    [E2M1[:8] * 2, (1.0, -1.0) * 8, (0.0,) * 16, (*E2M1[:15], -math.inf), (math.nan, *E2M1[1:])],
)
def test_other_tables_have_no_bytes(values: tuple[float, ...]) -> None:
    assert table_bytes(values) is None
    assert (table_halves(values) is None) == (
        not any(values) or not all(map(math.isfinite, values))
    )
