"""`init`: a first configuration, with comments, for data that were recognised; and a measurement of
some records with it."""

from collections import Counter
from pathlib import Path
from typing import Any, Final

import yaml

from offline_packing.config.packing import PackingConfig
from offline_packing.measure.measure import measure_first
from offline_packing.report.preview_text import first_words
from offline_packing.sources import open_source
from offline_packing.sources.reading.contents import hint_for
from offline_packing.sources.recognise import MANY, Recognised
from task_encoders.families import FAMILIES, model_options, pixel_limits_of, require_family
from task_encoders.text.qwen_vocabulary import BUILTIN

_TEXT_LENGTH: Final = 100
_MEASURED: Final = 10
_COMMENTS: Final = {
    "format": "how the samples are stored",
    "task": "captioning | vqa | bmr: what the model is shown, and what carries loss",
    "text_only": "the samples looked at have no picture: take it out if they should",
    "image_root": "what image paths are relative to",
    "split": "which of its splits is read; the others are left out",
    "dataset": "which entry of dataset_info.json",
    "processor": "or the checkpoint you train (folder, hub name); it sets lengths",
    "min_pixels": "as in training",
}


def output_beside(path: str) -> str:
    """Return the default output.path: out/packed, or a folder next to a source that contains it."""
    source, output = Path(path).resolve(), Path("out/packed")
    if not output.resolve().is_relative_to(source):
        return str(output)
    return str(source.with_name(f"{source.name}_packed"))


def render_config(found: Recognised, output: str, processor: str = BUILTIN) -> str:
    """Render a commented YAML file; all other fields have defaults. Raises ValueError if no family
    here has the checkpoint `processor`."""
    split = "  # no val split: of these few samples it would hold hardly a pack\n"
    if found.num_records >= MANY:
        split = "  split: {train: 0.99, val: 0.01}  # launch/*.sh validate on val\n"
    source = "".join(_line(name, value) for name, value in found.options.items())
    family = None if processor == BUILTIN else require_family(processor)
    options = model_options(family=family, processor=processor)
    limits = {} if processor == BUILTIN else pixel_limits_of(processor)
    model = f"  family: {options.family}  # {' | '.join(FAMILIES)}\n"
    model += _line("processor", options.processor)
    for name in ("min_pixels", "max_pixels"):
        if hasattr(options, name):
            model += _line(name, limits.get(name, getattr(options, name)))
    return f"""\
# All fields: docs/configuration.md. Run it with: offline-packing run --deep THIS_FILE
source:
{source}model:
{model}pack:
  seq_length: 8192  # tokens of a training sequence
output:
{_line("path", output)}{split}"""


def measure_some(config: PackingConfig) -> tuple[int, list[str]]:
    """Measure the first records of a configuration's source without writing anything. Return the
    number that can be packed; and a line per reason why others cannot, with a detail and a hint.
    Raises StageError as `measure`."""
    rows = measure_first(open_source(config.source[0]), config.model, _MEASURED)
    refused = [(row["reason"], row["detail"]) for row in rows if "reason" in row]
    counts, details = Counter(reason for reason, _ in refused), dict(reversed(refused))
    lines = []
    for reason, count in counts.items():
        hint = hint_for(reason, details[reason], config.source[0])
        why = f"{reason}: {details[reason]}{f'; {hint}' if hint else ''}"
        lines.append(f"would be set aside: {count} of {len(rows)} records, {why}")
    return len(rows) - len(refused), lines


def render_examples(found: Recognised) -> str:
    """Render the recognised format, and some records as they would be packed."""
    options = found.options
    lines = [f"{options['path']} is read with format {options['format']}, task {options['task']}"]
    if found.others:
        lines.append(f"it might also be of format {' or '.join(found.others)}")
    for example in found.examples:
        sample = example.sample
        if sample is None:
            lines.append(f"\n{example.key}: cannot be used: {example.problem}")
            continue
        lines.append(f"\n{example.key}: {sample.task}")
        for turn in sample.turns:
            shown = sample.task != "captioning"
            lines += [f"  prompt  {first_words(turn.prompt, _TEXT_LENGTH)}"] if shown else []
            lines.append(f"  answer  {first_words(turn.answer, _TEXT_LENGTH)}")
        if example.unread:
            unread = ", ".join(example.unread)
            lines.append(f"  not read: {unread} (source.fields says what they are)")
        lines += [f"  warning: {line}" for line in example.lost]
        for name in sample.media:
            state = example.missing.get(name, "found")
            lines.append(f"  medium  {first_words(name, _TEXT_LENGTH)} ({state})")
    return "\n".join(lines) + "\n"


def _line(name: str, value: Any) -> str:
    text = yaml.safe_dump({name: value}, allow_unicode=True, width=1000).rstrip("\n")
    if isinstance(value, dict):
        text = f"{name}: {yaml.safe_dump(value, default_flow_style=True, width=1000).strip()}"
    comment = _COMMENTS.get(name)
    return f"  {text}{f'  # {comment}' if comment else ''}\n"
