"""Defines `pacecar knobs`: lists, shows and forgets the best knobs of earlier runs.

It reads the same file as the jobs, without torch or a daemon.  Only `forget` changes it.  An unreadable file is
reported and left alone: only a job that wants to write moves it aside.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pacecar.formatting.dates import day_text
from pacecar.formatting.plain_text import clean
from pacecar.knobs import setting

from .shared_options import config_option, fail, load, print_json

if TYPE_CHECKING:
    from pacecar.controller.memory.knob_store import KnobStore, StoredKnobs

__all__ = ["knobs"]

KEY_DIGITS_MIN = 4
"""Shortest prefix of a key that selects an entry, so that a typing error does not forget a dozen of them."""

_file_option = click.option(
    "--file", "path", type=click.Path(path_type=Path), help="The knobs file.  [default: as configured]"
)
_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group()
def knobs() -> None:
    """The best knobs of earlier runs, which jobs of the same kind try first."""


@knobs.command("list")
@config_option
@_file_option
@_json_option
def list_(config_file: Path | None, path: Path | None, as_json: bool) -> None:
    """List the remembered knobs, the last used first."""
    from pacecar.formatting.quantities import large_count, percent

    file = _file(config_file, path)
    entries = sorted(_read(file), key=lambda entry: -entry.used_wall_ns)
    if as_json:
        print_json([_document(entry) for entry in entries])
        return
    if not entries:
        click.echo(f"Nothing is remembered in {file.path}.")
        return
    for entry in entries:
        changed = ", ".join(f"{knob} {setting(knob, value)}" for knob, value in sorted(entry.knobs.items()))
        saved = "stale" if entry.stale is not None else f"saves {percent(entry.gain_ratio)}"
        kind = entry.fingerprint
        click.echo(clean(f"{entry.key}  {saved:<13}  {day_text(entry.used_wall_ns)}  {entry.job}"))
        click.echo(clean(f"    {changed}"))
        count = large_count(kind.elements)
        click.echo(clean(f"    {count} parameters, {kind.world_size} ranks, {kind.device}, {kind.link}"))


@knobs.command()
@config_option
@_file_option
@_json_option
@click.argument("key")
def show(config_file: Path | None, path: Path | None, as_json: bool, key: str) -> None:
    """Show the entry whose key begins with KEY."""
    from pacecar.formatting.quantities import DASH, large_count, percent
    from pacecar.formatting.tables import TextColumn, fact_lines, table_lines

    entry = _one(_file(config_file, path), key)
    if as_json:
        print_json(_document(entry))
        return
    kind = entry.fingerprint
    facts = [
        ("key", entry.key),
        ("job", entry.job),
        ("saved", f"{day_text(entry.saved_wall_ns)}, last used {day_text(entry.used_wall_ns)}"),
        ("worth", f"saves {percent(entry.gain_ratio)} of the step, as measured"),
        ("pace", "unknown" if entry.pace_ns is None else f"{entry.pace_ns / 1e6:.1f} ms a step"),
        ("steps", str(entry.steps)),
        ("model", f"{large_count(kind.elements)} parameters ({kind.parameters})"),
        ("ranks", f"{kind.world_size} on {kind.device}, {kind.backend or 'no backend'} over {kind.link}"),
        ("versions", f"torch {kind.torch}, pacecar {entry.pacecar_version}"),
    ]
    if entry.stale is not None:
        facts.append(("stale", f"no longer tried: {entry.stale}"))
    rows = []
    for knob in sorted(kind.began.keys() | entry.knobs.keys()):
        values = (kind.began.get(knob), entry.knobs.get(knob, kind.began.get(knob)))
        rows.append((knob, *(DASH if value is None else setting(knob, value) for value in values)))
    columns = [TextColumn("knob", 20)]
    columns += [TextColumn(title, 12, is_number=True) for title in ("began with", "best")]
    click.echo("\n".join((*fact_lines(facts), "", *table_lines(columns, rows))))


@knobs.command()
@config_option
@_file_option
@click.option("--all", "everything", is_flag=True, help="Forget all entries.")
@click.option("--stale", "is_stale", is_flag=True, help="Forget the entries that did not hold.")
@click.argument("keys", nargs=-1)
def forget(
    config_file: Path | None, path: Path | None, everything: bool, is_stale: bool, keys: tuple[str, ...]
) -> None:
    """Forget the entries whose keys begin with KEYS."""
    if everything + is_stale + bool(keys) != 1:
        raise click.UsageError("give KEYS, or --all, or --stale")
    from pacecar.controller.memory.knob_store import KnobsFileError, forgotten

    file = _file(config_file, path)
    wanted = [_one(file, key).key for key in keys]
    if not keys:
        wanted = [entry.key for entry in _read(file) if everything or entry.stale is not None]
    try:
        if wanted:
            file.change(lambda entries: forgotten(entries, wanted))
    except KnobsFileError as error:
        fail(str(error))
    click.echo(f"Forgot {len(wanted)} {'entry' if len(wanted) == 1 else 'entries'} of {file.path}.")


def _file(config_file: Path | None, path: Path | None) -> KnobStore:
    from pacecar.controller.memory.knob_store import KnobStore, default_place

    if path is not None:
        return KnobStore(path, is_ours=False)
    configured = load(config_file, {}).tune.knobs_file
    if configured is not None:
        return KnobStore(Path(configured).expanduser().absolute(), is_ours=False)
    place = default_place()
    if place is None:
        fail("this user has no home directory: set [tune] knobs_file to remember knobs", code=2)
    return KnobStore(place, is_ours=True)


def _read(file: KnobStore) -> tuple[StoredKnobs, ...]:
    from pacecar.controller.memory.knob_store import KnobsFileError

    try:
        return file.read()
    except KnobsFileError as error:
        fail(str(error))


def _one(file: KnobStore, key: str) -> StoredKnobs:
    if len(key) < KEY_DIGITS_MIN:
        raise click.UsageError(f"{key!r} is too short: give at least {KEY_DIGITS_MIN} digits of the key")
    found = [entry for entry in _read(file) if entry.key.startswith(key)]
    if len(found) != 1:
        fail(f"{len(found) or 'no'} entries of {file.path} begin with {key!r}; see `pacecar knobs list`")
    return found[0]


def _document(entry: StoredKnobs) -> dict[str, Any]:
    import msgspec

    document: dict[str, Any] = msgspec.to_builtins(entry)
    return document
