"""`fsdp-tui families`, and the table in the documents that is made from it."""

from __future__ import annotations

import json
import re

import pytest
from click.testing import CliRunner, Result

from jobs.errors import SpecError
from jobs.spec.families import FAMILIES, get_family
from tests.support.paths import ROOT
from tui.cli.prepare.families import families, table

PAGE = ROOT / "docs" / "families.md"


def run(*words: str) -> Result:
    return CliRunner().invoke(families, words)


def test_every_family_and_flavour_is_listed_with_its_size() -> None:
    said = run()
    assert said.exit_code == 0
    for family in FAMILIES.values():
        assert f"{family.name}  {family.title}" in said.output
        for name, flavour in family.flavours.items():
            line = rf"^  {re.escape(name)} +[\d.]+ B  {flavour.hub_id}"
            assert re.search(line, said.output, re.MULTILINE)


def test_json_says_what_scripts_need() -> None:
    (flux,) = json.loads(run("FLUX", "--json").output)
    assert (flux["name"], flux["title"], flux["makes"]) == ("flux", "FLUX.1", "pictures")
    assert flux["flavours"]["dev"]["hub_id"] == "black-forest-labs/FLUX.1-dev"
    assert flux["flavours"]["dev"]["parameters"] == 11_901_408_320
    assert flux["flavours"]["schnell"]["defaults"]["validation_num_inference_steps"] == 4
    (wan,) = json.loads(run("wan", "--json").output)
    need = [
        wan["flavours"][name]["smallest_gpus"]["lora"]["48"]
        for name in ("2.1-t2v-1.3b", "2.1-t2v-14b")
    ]
    assert need[0] < need[1], "each size has its own row"
    everything = json.loads(run("--json").output)
    assert [family["name"] for family in everything] == list(FAMILIES)


def test_the_page_has_the_table_of_the_code() -> None:
    text = PAGE.read_text(encoding="utf-8")
    match = re.search(r"<!-- families: .*? -->\n(.*)\n<!-- /families -->", text, re.S)
    assert match is not None
    assert match[1] == table(list(FAMILIES.values())), "run `python docs/make.py`"


def test_an_unknown_family_or_flavour_names_the_nearest_and_all() -> None:
    for wrong, near in (("qwen", "qwen_image"), ("flux1", "flux"), ("wan2", "wan")):
        with pytest.raises(SpecError, match=rf'unknown model_family "{wrong}".*"{near}"') as found:
            get_family(wrong)
        assert all(name in str(found.value) for name in FAMILIES)
    with pytest.raises(SpecError, match=r'unknown model_flavour "snell".*"schnell"') as found:
        get_family("flux", "snell")
    assert all(name in str(found.value) for name in FAMILIES["flux"].flavours)
    assert isinstance(run("qwen").exception, SpecError)
