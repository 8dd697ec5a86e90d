"""All stages in one call from Python; `offline-packing run` does the same and prints."""

import logging
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offline_packing.config.packing import PackingConfig, load_config, parse_config
from offline_packing.errors import StageError
from offline_packing.measure.measure import measure
from offline_packing.plan.plan import plan
from offline_packing.report.report import report
from offline_packing.runs.run import Run, build_engine
from offline_packing.runs.set_aside import check_set_aside
from offline_packing.runs.warnings import run_warnings
from offline_packing.verify.shard import VerifyResult
from offline_packing.verify.verdict import check, known_verdict
from offline_packing.verify.verify import check_deep, render_verdict
from offline_packing.write.write import write
from task_encoders.packs.manifest import Manifest

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Packed:
    """A packed dataset."""

    #: the folder a trainer is given
    path: Path
    manifest: Manifest
    verified: VerifyResult
    #: the page with its figures
    report: Path
    #: lines about probable mistakes in the data or the configuration, as they are logged
    warnings: tuple[str, ...]

    def _repr_html_(self) -> str:
        return self.manifest._repr_html_()


def pack(
    config: PackingConfig | Mapping[str, Any] | str | Path,
    *overrides: str,
    deep: bool = False,
    progress: bool = False,
    accept_mismatch: Collection[str] = (),
) -> Packed:
    """Measure, plan, write, verify and report; skip what is complete.

    Args:
        config: a configuration, its content as a dict, or the path of its YAML file.
        overrides: "key.sub=value", for a YAML file.
        deep: also compare the packs with the source, and encode every sample again.
        progress: show progress bars on stderr.
        accept_mismatch: fields that may differ from an earlier, unfinished run.

    Raises:
        ConfigError: a field is unknown or has a bad value.
        StageError: a stage cannot continue, too much would be set aside, or the check failed.
    """
    if isinstance(config, str | Path):
        config = load_config(config, overrides)
    elif overrides:
        raise TypeError("overrides change a YAML file; change the configuration itself")
    elif not isinstance(config, PackingConfig):
        config = parse_config(config)
    with ExitStack() as stack:
        engine = stack.enter_context(build_engine(config.engine))
        run = Run(config, engine, frozenset(accept_mismatch), progress=progress)
        stack.enter_context(run.workspace.lock(shared=engine.IS_SHARED))
        if deep:
            check_deep(config)
        samples = measure(run)
        made = plan(run, samples)
        warnings = tuple(run_warnings(config, samples, made.packs))
        for line in warnings:
            logger.warning("pack: warning: %s", line)
        workspace = run.workspace
        if not workspace.manifest.exists():
            check_set_aside(run)
        manifest = write(run, samples, made)
        known = known_verdict(run, deep=deep)
        if known is not None:
            logger.info("%s", known)
        verified = known.result if known is not None else check(run, deep=deep)
        if not verified.ok:
            raise StageError(f"{workspace.root} has {render_verdict(verified)}")
        report(run)
    page = workspace.report / "report.html"
    return Packed(workspace.root, manifest, verified, page, warnings)
