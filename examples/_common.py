"""What the examples share: data, a progress bar, tables, pictures, and the command line."""

import argparse
import contextlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Array


def digits(seed: int, test_size: float = 0.2, only: range = range(10)) -> tuple[Any, Any]:
    """Images of shape `(n, 8, 8)`, and which digits they show, counted from the first: to train and to test on."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    chosen = np.isin(labels, only)
    images = (pixels[chosen] / 16).astype(np.float32).reshape(-1, 8, 8)
    labels = labels[chosen].astype(np.int32) - only.start
    parts = train_test_split(images, labels, test_size=test_size, stratify=labels, random_state=seed)
    return tuple(parts[::2]), tuple(parts[1::2])


def shuffled(key: Array, count: int, size: int) -> Array:
    """Batches of numbers up to a count, in random order; those that do not fill one wait for another epoch."""
    return jax.random.permutation(key, count)[: count // size * size].reshape(-1, size)


def tumours() -> tuple[np.ndarray, np.ndarray]:
    """Ten measurements of each tumour as mean, error and worst value, shape `(569, 3, 10)`; whether it is benign."""
    from sklearn.datasets import load_breast_cancer

    measured, benign = load_breast_cancer(return_X_y=True)
    return np.reshape(measured, (-1, 3, 10)), np.asarray(benign)


def progress(items: Iterable[Any], title: str) -> Any:
    """A bar in the terminal while the items are gone through."""
    from tqdm import tqdm

    return tqdm(items, f"{title:24}", ncols=100, file=sys.stderr)


def table(*rows: Sequence[str]) -> str:
    """The first column to the left, all others to the right; the first row is the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * (sum(widths) + 2 * len(widths) - 2), *lines[1:]])


@contextlib.contextmanager
def figure(plot: str, width: float = 8.5, height: float = 4.0) -> Iterator[Any]:
    """A picture to draw in, which is then written; in the notebooks' style, and without pyplot and its windows."""
    import matplotlib.style
    from matplotlib.figure import Figure

    with matplotlib.style.context(Path(__file__).parents[1] / "notebooks" / "figures.mplstyle"):
        picture = Figure(figsize=(width, height))
        yield picture
        picture.savefig(plot)


def draw(plot: str, lines: Mapping[str, tuple[Any, Any]], **axes: Any) -> None:
    """A picture of named lines, or sheaves of lines, with what to set of its axes."""
    with figure(plot) as picture:
        drawn = picture.subplots()
        for i, (name, (x, y)) in enumerate(lines.items()):
            drawn.plot(x, y, color=f"C{i}")[0].set_label(name)
        drawn.set(**axes)
        picture.legend(loc="outside right upper")


def command_line(main: Callable[..., Any], claims: Callable[[Any], Mapping[str, Any]]) -> None:
    """Runs `main`, whose parameters are the options, and checks what is claimed of its result.

    `--plot` names a picture to write; its directory is looked for before the work begins.
    """
    parser = argparse.ArgumentParser(description=main.__doc__)
    for name, parameter in inspect.signature(main).parameters.items():
        said = "a picture to write" if name == "plot" else "default: %(default)s"
        parser.add_argument(f"--{name}", type=type(parameter.default), default=parameter.default, help=said)
    given = vars(parser.parse_args())
    if not Path(given.get("plot", "")).parent.is_dir():
        parser.error(f"there is no directory {Path(given['plot']).parent} for the picture")
    try:
        outcome = main(**given)
    except ModuleNotFoundError as error:
        remedy = "install this checkout with pip install -e '.[examples]'"
        raise SystemExit(f"this example needs {error.name}: {remedy}") from None
    checked = claims(outcome)
    print("\nChecked:")
    for claim, holds in checked.items():
        print(f"  {'ok' if holds else 'FAILED'}  {claim}")
    if not all(checked.values()):
        raise SystemExit(1)
