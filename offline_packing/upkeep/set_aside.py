"""set-aside: list the samples that are in no pack."""

import io
from collections.abc import Collection, Iterator

import pyarrow.csv

from offline_packing.errors import StageError
from offline_packing.index.set_aside import read_set_aside
from offline_packing.index.table import IndexInfo
from offline_packing.runs.losses import aside_while_measuring, aside_while_planning
from offline_packing.runs.run import Run


def list_set_aside(
    run: Run, *, reasons: Collection[str] = (), as_csv: bool = False
) -> Iterator[str]:
    """Lines of key, source, reason and detail, many at a time: what `measure` set aside, then what
    `plan` did.

    Args:
        reasons: list these only.
        as_csv: comma-separated with a header, quoted as RFC 4180 has it; otherwise tabs.

    Raises:
        StageError: nothing is measured yet, or a table is damaged.
    """
    workspace = run.workspace
    info = IndexInfo.load(workspace.index_info)
    if info is None:
        raise StageError(f"no complete index in {workspace.root}; run measure first")
    paths = [*aside_while_measuring(workspace, info), *aside_while_planning(workspace)]
    if as_csv:
        yield "key,source,reason,detail\n"
    for table in read_set_aside(paths, reasons):
        if as_csv:
            buffer = io.BytesIO()
            options = pyarrow.csv.WriteOptions(include_header=False)
            pyarrow.csv.write_csv(table, buffer, options)
            yield buffer.getvalue().decode()
        else:
            rows = zip(*(column.to_pylist() for column in table.columns), strict=True)
            yield "".join("\t".join(" ".join(text.split()) for text in row) + "\n" for row in rows)
