"""python notebooks/build.py [NAME ...]: make notebooks/NAME.ipynb from notebooks/src/NAME.py, executed, outputs stored.

The sources are what people edit: Python with cells marked `# %%` (jupytext's percent format). A notebook is made from its source
alone and run in a clean kernel, and what differs from run to run is left out, so that building twice changes nothing.
The output of a cell tagged `hide-output` is folded away: it answers a question. What a cell tagged `machine` prints depends on
the machine, as times do: no test compares it, and it is stored anew only together with something else.
"""

import hashlib
import os
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
TIMEOUT = 60  # seconds a cell may take
LANGUAGE = {"file_extension": ".py", "mimetype": "text/x-python", "name": "python"}
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def sources():
    """The source files in the order of the course."""
    return sorted((FOLDER / "src").glob("[0-9]*.py"))


def target(source):
    """Where the notebook of a source lies."""
    return FOLDER / f"{source.stem}.ipynb"


def convert(source):
    """The notebook of a source, without outputs; a cell's id comes from its text, so it is the same each time."""
    import jupytext

    notebook, seen = jupytext.read(source), {}
    for cell in notebook.cells:
        digest = hashlib.sha256(cell.source.encode()).hexdigest()[:8]
        seen[digest] = seen.get(digest, 0) + 1
        cell.id = f"{digest}-{seen[digest]}"
        if "hide-output" in cell.metadata.get("tags", ()):
            cell.metadata["jupyter"] = {"outputs_hidden": True}
    notebook.metadata = {"kernelspec": KERNEL, "language_info": LANGUAGE}
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


def execute(notebook, threads=1, timeout=TIMEOUT):
    """Run the cells of `notebook` in a clean kernel and keep what they put out. RuntimeError for anything on stderr.

    threads: of the BLAS library. How many there are changes the last digits of a product, and in the end a training. timeout: of
    each cell, in seconds.

    An error in a cell is raised here as nbclient's CellExecutionError.
    """
    # A kernel inherits these: its BLAS threads, minamp from this repository, and settings that are nobody's. A matplotlibrc, a
    # list of fonts or a profile of IPython in somebody's home would draw other figures.
    os.environ["OPENBLAS_NUM_THREADS"] = str(threads)
    os.environ["PYTHONPATH"] = str(FOLDER.parent)
    os.environ["MPLCONFIGDIR"] = str(Path(sys.prefix) / "etc/matplotlib")
    os.environ["IPYTHONDIR"] = str(Path(sys.prefix) / "etc/ipython")
    os.environ.pop("MATPLOTLIBRC", None)
    import matplotlib.font_manager  # noqa: F401  makes that list, the first time, and says so here and not in a cell
    from nbclient import NotebookClient

    client = NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,  # printed lines arrive in pieces, cut by chance
        resources={"metadata": {"path": str(FOLDER)}},
    )
    client.execute()
    notebook.metadata = {"kernelspec": KERNEL, "language_info": LANGUAGE}  # the kernel has added its version
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.execution_count = None
            cell.outputs = [_kept(output, cell) for output in cell.outputs]
    return notebook


def _kept(output, cell):
    if output.output_type == "stream" and output.name == "stderr":
        raise RuntimeError(
            f"the cell\n{cell.source}\nwrote to stderr, and no reader should see that:\n{output.text}"
        )
    if output.output_type == "execute_result":
        output.execution_count = None
    return output


def lasting(notebook):
    """What is the same each time: the cells, and the outputs of those that are not tagged `machine`."""
    return [
        (cell.id, cell.metadata, "machine" in cell.metadata.get("tags", ()) or cell.get("outputs"))
        for cell in notebook.cells
    ]


def build(source):
    """Make the notebook of `source`; True if that changed the file. New times alone are no reason to change it."""
    import nbformat

    path = target(source)
    notebook = execute(convert(source))
    nbformat.validate(notebook)
    if path.exists() and lasting(nbformat.read(path, as_version=4)) == lasting(notebook):
        return False
    path.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")
    return True


def main(names):
    known = {source.stem: source for source in sources()}
    if unknown := set(names) - set(known):
        print(
            f"build: no source named {', '.join(sorted(unknown))}; there are {', '.join(known)}",
            file=sys.stderr,
        )
        return 2
    for name in names or known:
        print(
            f"{target(known[name]).relative_to(FOLDER.parent)}: {'written' if build(known[name]) else 'unchanged'}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
