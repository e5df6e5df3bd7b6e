"""Every field that crosses the socket has a range, and values outside of it are refused."""

import math
from typing import get_args

import msgspec
import pytest
from msgspec import inspect

from pacecar.config import Config, ConfigError, load_config
from pacecar.records import Vitals
from pacecar.records.ranges import COUNT_MAX, INT64_MAX, TEXT_CHARACTERS_MAX
from pacecar.wire import FrameError, Message, Refusal, decode_frame, encode_frame
from tests.kit.anyrecord import Rolled, make
from tests.kit.records import job_hello, step_record

KINDS = get_args(Message)


def gaps(kind, path, *, seen=(), numbers_only=False):
    """Yield the path of each value in the type `kind` that has no bound."""
    match kind:
        case inspect.UnionType():
            for one in kind.types:
                yield from gaps(one, path, seen=seen, numbers_only=numbers_only)
        case inspect.StructType():
            if kind.cls in seen:
                return
            for field in kind.fields:
                here = f"{path}.{field.name}"
                yield from gaps(field.type, here, seen=(*seen, kind.cls), numbers_only=numbers_only)
        case inspect.IntType() | inspect.FloatType():
            lower = kind.ge if kind.ge is not None else kind.gt
            upper = kind.le if kind.le is not None else kind.lt
            if lower is None or upper is None:
                yield path
        case inspect.StrType():
            if kind.max_length is None and not numbers_only:
                yield path
        case inspect.DictType():
            if kind.max_length is None and not numbers_only:
                yield path
            yield from gaps(kind.key_type, f"{path}.key", seen=seen, numbers_only=numbers_only)
            yield from gaps(kind.value_type, f"{path}.value", seen=seen, numbers_only=numbers_only)
        case inspect.VarTupleType() | inspect.ListType() | inspect.SetType():
            if kind.max_length is None and not numbers_only:
                yield path
            yield from gaps(kind.item_type, f"{path}[]", seen=seen, numbers_only=numbers_only)
        case inspect.BoolType() | inspect.NoneType() | inspect.LiteralType() | inspect.EnumType():
            pass
        case _:
            yield f"{path}: {kind}"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_field_of_every_record_has_a_range(kind):
    assert list(gaps(inspect.type_info(kind), kind.__name__)) == []


def test_every_number_of_the_configuration_has_a_range():
    assert list(gaps(inspect.type_info(Config), "config", numbers_only=True)) == []


def test_a_field_without_a_range_would_be_noticed():
    class Inner(msgspec.Struct):
        count: int
        names: dict[str, float]

    class Outer(msgspec.Struct):
        inner: tuple[Inner, ...]

    found = list(gaps(inspect.type_info(Outer), "o"))
    assert found == ["o.inner", "o.inner[].count", "o.inner[].names", "o.inner[].names.key", "o.inner[].names.value"]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_values_at_the_bounds_pass(kind):
    source = Rolled(seed=7)
    for _ in range(30):
        fields = make(kind, source)
        decoded = msgspec.convert(fields, kind)
        try:
            assert decode_frame(encode_frame(decoded)) == decoded
        except FrameError as error:
            assert error.refusal is Refusal.OVERSIZED, error  # noqa: PT017  the only one that may be


def vitals(**changes):
    given = {
        "job": "j", "rank": 0, "step": 1, "ended_wall_ns": 1, "steps": 1, "wall_ns": 1, "samples": None, "tokens": None,
        "flops": 100, "flops_steps": 1, "flops_wall_ns": 1,
    }  # fmt: skip
    return Vitals(**(given | changes))


@pytest.mark.parametrize(
    ("record", "field"),
    [
        (vitals(peak_flops_per_second=0), "peak_flops_per_second"),
        (vitals(flops=-1), "flops"),
        (vitals(flops=INT64_MAX + 1), "flops"),
        (vitals(wall_ns=-5), "wall_ns"),
        (vitals(flops_reason="x" * (TEXT_CHARACTERS_MAX + 1)), "flops_reason"),
        (step_record(ended_wall_ns=-1), "ended_wall_ns"),
        (step_record(total_steps=COUNT_MAX + 1), "total_steps"),
        (step_record(measured_every=0), "measured_every"),
        (job_hello(world_size=0), "world_size"),
        (job_hello(pid=-4), "pid"),
        (job_hello(parallel={"data": 0}), "parallel"),
    ],
)
def test_what_is_out_of_range_is_refused_and_the_field_named(record, field):
    with pytest.raises(FrameError, match=field) as refused:
        decode_frame(encode_frame(record))
    assert refused.value.refusal is Refusal.MALFORMED


def floats(kind):
    return [
        field.name
        for field in inspect.type_info(kind).fields
        for one in (field.type.types if isinstance(field.type, inspect.UnionType) else [field.type])
        if isinstance(one, inspect.FloatType)
    ]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e300, -1e300])
def test_no_float_of_any_record_may_be_nan_infinite_or_beyond_its_range(value):
    source, tried = Rolled(seed=1), 0
    for kind in KINDS:
        for name in floats(kind):
            if name == "evidence" and value == 1e300:
                continue  # an e-value may be so large
            fields = make(kind, source, **{name: value})
            with pytest.raises(msgspec.ValidationError, match=rf"\$\.{name}"):
                msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=kind)
            tried += 1
    assert tried >= 8


@pytest.mark.parametrize("value", ["0.4", "0", "-1", "nan", "inf", "1e300"])
def test_a_peak_that_cannot_be_divided_by_is_an_error_that_names_file_table_key_and_value(tmp_path, value):
    file = tmp_path / "pacecar.toml"
    file.write_text(f"[hook]\npeak_flops_per_second = {value if value in ('nan', 'inf') else float(value)}\n")
    with pytest.raises(ConfigError) as wrong:
        load_config(file, environ={})
    for word in (str(file), "[hook]", "peak_flops_per_second", str(float(value))):
        assert word in str(wrong.value)


@pytest.mark.parametrize("key", ["hang_seconds", "flops_per_sample", "flops_per_token"])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_no_number_of_the_hook_may_be_nan_or_infinite(tmp_path, key, value):
    file = tmp_path / "pacecar.toml"
    file.write_text(f"[hook]\n{key} = {value}\n")
    with pytest.raises(ConfigError, match=key):
        load_config(file, environ={})
