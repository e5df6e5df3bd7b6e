"""docs/doctor.md lists the current rules, options and fields."""

from __future__ import annotations

import re
from pathlib import Path

from pacecar.commands.doctor.command import doctor
from pacecar.commands.doctor.document import as_document
from pacecar.commands.doctor.reference import BEGIN, END, renew, table
from pacecar.commands.doctor.rules.registry import RULES, judge
from tests.commands.doctor.faults import FAULTS
from tests.commands.doctor.machine import h100_node

PAGE = Path(__file__).parents[3] / "docs/doctor.md"
TEXT = PAGE.read_text(encoding="utf-8")


def test_the_table_of_findings_is_that_of_the_rules(tmp_path):
    copy = tmp_path / "doctor.md"
    copy.write_text(TEXT, encoding="utf-8")
    renew(copy)
    assert copy.read_text(encoding="utf-8") == TEXT, "write it anew: python -m pacecar.commands.doctor docs/doctor.md"
    assert set(re.findall(r"^\| `([\w-]+)` \|", table(), re.MULTILINE)) == {rule.id for rule in RULES}
    assert TEXT.index(BEGIN) < TEXT.index(END)


def test_every_option_is_described():
    options = {option for parameter in doctor.params for option in parameter.opts}
    assert options <= {*re.findall(r"(--[\w-]+)", TEXT)}


def test_every_key_of_the_document_is_described(tmp_path):
    machine = h100_node()
    FAULTS[0].plant(machine)
    facts = machine.collect_facts(tmp_path)
    document = as_document(facts, judge(facts))
    described = set(re.findall(r"`(\w+)`", TEXT[TEXT.index("## JSON") : TEXT.index("## Findings")]))
    keys = {*document, *document["findings"][0], *document["findings"][0]["evidence"][0], "at_most_ratio", "basis"}
    assert keys <= described
