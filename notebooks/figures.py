"""Figures with alternative texts."""

import matplotlib.pyplot as plt
from IPython.display import display


def show(alt: str) -> None:
    """Shows the current figure of a notebook.

    Args:
        alt: describes the figure to readers who cannot see it. The notebook keeps this text beside
            the picture, where nbconvert and the documentation site look for it.
    """
    display(plt.gcf(), metadata={"image/png": {"alt": alt}})
    plt.close()
