"""By name: what is in a file, what goes where, and back into a model.
"""

from ._save import load as load, metadata as metadata, save as save
