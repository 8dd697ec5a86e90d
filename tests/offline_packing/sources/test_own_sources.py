"""A source of one's own is one file; its options are declared there, and the configuration, the
fingerprint and the source itself take them from there."""

import sys
from pathlib import Path

import pytest

import offline_packing.sources as sources_package
from offline_packing.config.packing import parse_config
from offline_packing.errors import ConfigError
from offline_packing.measure.measure import measure
from offline_packing.runs.artifacts import config_fingerprint
from offline_packing.runs.run import open_sources
from offline_packing.sources import SOURCES, Source
from tests.helpers.datasets import make_run

MODULE = '''
from offline_packing.sources import Source
from offline_packing.sources.formats.jsonl import JsonlSource
from offline_packing.sources.options import FileOptions


class FirstOptions(FileOptions):
    first: int = 2


class FirstSource(JsonlSource):
    """The first lines of each part."""

    Options = FirstOptions
    options: FirstOptions

    def records(self, part):
        for number, record in enumerate(super().records(part)):
            if number < self.options.first:
                yield record
'''


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source in a file of its own, and data for it."""
    (tmp_path / "first_source.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "first_source", raising=False)
    (tmp_path / "a.jsonl").write_text('{"text": "One line."}\n' * 6)
    return tmp_path / "a.jsonl"


def test_an_option_of_ones_own(path: Path, tmp_path: Path) -> None:
    source = {"format": "first_source:FirstSource", "path": str(path), "task": "captioning"}
    output = {"path": str(tmp_path / "out")}
    config = parse_config({"source": {**source, "first": 3}, "output": output})
    assert config.source[0].model_dump()["first"] == 3
    assert config.model_dump()["source"][0]["first"] == 3
    assert config_fingerprint(config)["source.0.first"] == "3"
    default = parse_config({"source": source, "output": output})
    assert "source.0.first" not in config_fingerprint(default)
    assert isinstance(open_sources(default)[0], Source)
    run = make_run({**source, "first": 3}, tmp_path / "packed")
    assert measure(run).info.num_samples == 3
    with pytest.raises(ConfigError, match=r"source\.0\.first.*integer"):
        parse_config({"source": {**source, "first": "many"}, "output": output})
    with pytest.raises(
        ConfigError, match=r"source\.0\.frist is not a known field; valid: .*, first"
    ):
        parse_config({"source": {**source, "frist": 1}, "output": output})


def test_a_name_in_the_registry_is_all_that_a_format_needs(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = sources_package.source_class("first_source:FirstSource")
    monkeypatch.setitem(SOURCES, "first", found)
    source = {"format": "first", "path": str(path), "task": "captioning"}
    assert measure(make_run(source, tmp_path / "packed")).info.num_samples == 2
    other = {**source, "format": "jsonl", "first": 2}
    with pytest.raises(ConfigError, match="first applies to format first only; remove it"):
        parse_config({"source": other, "output": {"path": str(tmp_path / "out")}})
