"""An inspection as tables, as `srt inspect` shows it."""

from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from srt.inspection.findings import Inspection


def show(console: Console, inspection: Inspection) -> None:
    """Writes all findings."""
    console.print(_table((), [("model", inspection.path), *_facts(inspection)]))
    if inspection.dtypes:
        console.print(
            _table(
                ("dtype", "tensors", "elements", "bytes"),
                [
                    (d.dtype, d.tensors, f"{d.elements:,}", _size(d.nbytes))
                    for d in inspection.dtypes
                ],
            )
        )
    if inspection.modules:
        console.print(
            _table(
                ("module", "count", "scheme", "weight", "scale"),
                [
                    (
                        group.name,
                        group.count,
                        group.scheme,
                        f"{group.dtype} {_shape(group.shape)}",
                        ""
                        if group.scale_shape is None
                        else f"{group.scale_dtype} {_shape(group.scale_shape)}",
                    )
                    for group in inspection.modules
                ],
            )
        )
    if inspection.ignored:
        console.print(
            _table(
                ("not used", "count", "bytes", "why"),
                [(i.name, i.count, _size(i.nbytes), i.reason) for i in inspection.ignored],
            )
        )
    if inspection.runs_here:
        console.print("[bold green]Runs here: yes[/]")
    else:
        console.print("[bold red]Runs here: no[/]")
        for problem in inspection.problems:
            console.print(f"  {problem}", markup=False)


def _facts(inspection: Inspection) -> list[tuple[str, str]]:
    memory = inspection.memory
    facts = [("architecture", inspection.architecture), ("scheme", inspection.scheme)]
    if inspection.listed_unquantized and not inspection.has_weights:
        facts.append(("listed as unquantized", ", ".join(inspection.listed_unquantized)))
    if inspection.parameters is not None:
        facts.append(("parameters", f"{inspection.parameters:,}"))
    if inspection.files:
        size = _size(sum(inspection.files.values()))
        facts.append(("files", f"{len(inspection.files)}, {size}"))
    else:
        facts.append(("files", "no weights: configuration only"))
    if inspection.kv_scale_layers:
        facts.append(("KV cache scales", f"in {inspection.kv_scale_layers} layers"))
    if memory.weights is not None:
        facts.append(("memory for weights", _size(memory.weights)))
    if memory.kv_per_token is not None:
        facts.append(("memory a token", _size(memory.kv_per_token)))
    if memory.kv_context is not None:
        full = f"{_size(memory.kv_context)} for {memory.context_length:,} tokens"
        facts.append(("memory for the context", full))
    if memory.available is not None:
        facts.append(("memory available here", _size(memory.available)))
    return facts


def _table(headings: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> Table:
    """A borderless table; columns of numbers stand on the right."""
    numeric = ("tensors", "elements", "bytes", "count")
    table = Table(box=box.SIMPLE_HEAD, show_header=bool(headings), padding=0, pad_edge=False)
    for heading in headings:
        table.add_column(
            heading, justify="right" if heading in numeric else "left", overflow="fold"
        )
    for row in rows:
        table.add_row(*(escape(str(cell)) for cell in row))
    return table


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _size(nbytes: int) -> str:
    """Bytes in the largest decimal unit that leaves at least 1."""
    size = float(nbytes)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.4g} {unit}"
        size /= 1000
    return f"{size:.4g} GB"
