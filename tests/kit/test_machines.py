"""Recorded machines are read line by line, and a site looks as if each machine had been laid out in an empty folder."""

import pytest

from tests.kit import machines
from tests.kit.machines import MACHINES, Recording, Site, machine, recording, write

NAMES = sorted(path.stem for path in MACHINES.glob("*.txt") if path.read_text().startswith("#"))


def seen(root):
    return {
        str(path.relative_to(root)): str(path.readlink())
        if path.is_symlink()
        else None
        if path.is_dir()
        else path.read_bytes()
        for path in root.rglob("*")
    }


def test_each_form_of_a_line_is_what_it_says(tmp_path, monkeypatch):
    (tmp_path / "one.txt").write_text(
        "# said of it\n\na/b = x = y\na/c -> d\ne/\nf @100 0d00 @200 ff\nempty\ntext\n| first\n|\n| # last\n"
    )
    monkeypatch.setattr(machines, "MACHINES", tmp_path)
    page = bytearray(4096)
    page[0x100], page[0x200] = 0x0D, 0xFF
    files = {"a/b": "x = y\n", "f": bytes(page), "empty": "", "text": "first\n\n# last\n"}
    assert recording("one") == Recording(files, {"a/c": "d"}, ("e/",))
    there = seen(machine("one", tmp_path / "there"))
    assert there["a/c"] == "../d"
    assert there["e"] is None


@pytest.mark.parametrize(("text", "complaint"), [("a = 1\na = 2\n", ":2: a twice"), ("| x\n", ":1: a line of no file")])
def test_a_line_that_says_nothing_is_named(tmp_path, monkeypatch, text, complaint):
    (tmp_path / "one.txt").write_text(text)
    monkeypatch.setattr(machines, "MACHINES", tmp_path)
    with pytest.raises(ValueError, match=complaint):
        recording("one")


@pytest.mark.slow
def test_a_site_holds_what_was_built_last_and_nothing_of_what_was_before(tmp_path):
    site = Site(tmp_path / "site")
    for name in [*NAMES, NAMES[0]]:
        files, links, _ = recording(name)
        site.build(files, links)
        fresh = tmp_path / f"{name}-{len(list(tmp_path.iterdir()))}"
        write(fresh, files, links)
        assert seen(site.root) == seen(fresh), name
