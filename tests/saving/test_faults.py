"""Files that are damaged or made up: one clear error with the name of the file, and nothing is allocated."""

import json
import os
import re
import tracemalloc
import zlib

import hypothesis
import hypothesis.strategies as st
import numpy as np
import optax
import pytest

from treeparams import optim, saving

# -- Damaged -----------------------------------------------------------------------------------------------------------


def tree_of(fill):
    """All of NumPy, so that JAX stays at rest; one array is larger than what is written at once."""
    weight = np.full((2, 3), fill, np.float32)
    low = np.full((3, 600), fill, "f2")
    return {"first": weight, "second": weight, "z": np.full(2, fill, np.complex64), "low": low}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("faults") / "model.safetensors"


@pytest.fixture(scope="module")
def like():
    tx = optim.trainable(optax.sgd(0.1, momentum=0.9))
    state = tx.init({"a": np.ones(2, "f"), "b": np.ones((), "f")})
    return tree_of(0) | {"epoch": 5, "x": np.float16(2), "key": np.zeros(2, "u4"), "state": state}


@pytest.fixture(scope="module")
def good(path, like):
    """The bytes of a good file, and where its arrays begin."""
    saving.save(path, like | tree_of(1), metadata={"run": "7"})
    data = path.read_bytes()
    return data, 8 + int.from_bytes(data[:8], "little")


def refused(path, read):
    """The error of a file that cannot be read: a ValueError and nothing else, with the file's name."""
    with pytest.raises(ValueError, match=re.escape(repr(str(path)))) as error:
        read()
    assert type(error.value) is ValueError
    assert len(str(error.value)) < 2000
    return str(error.value)


DAMAGED = "is no safetensors file, or damaged: "


def test_cut_anywhere(path, like, good):
    data, start = good
    path.write_bytes(data)
    assert (saving.load(path, like)["first"] == 1).all()
    places = {*range(start), *np.linspace(start, len(data) - 1, 100).astype(int)}
    for place in sorted(places, reverse=True):
        os.truncate(path, place)
        assert DAMAGED in refused(path, lambda: saving.load(path, like))
    path.write_bytes(data + b"\0")
    said = refused(path, lambda: saving.metadata(path))
    assert f"its arrays end at byte {len(data):,}, and the file has {len(data) + 1:,}" in said


def test_one_byte_flipped_anywhere(path, like, good):
    data, start = good
    path.write_bytes(data)
    places = [*range(start), *np.linspace(start, len(data) - 1, 60).astype(int)]
    with open(path, "r+b", buffering=0) as file:
        for count, place in enumerate(places):
            flip = [1 << count % 8, 0xFF][count // 8 % 2]
            os.pwrite(file.fileno(), bytes([data[place] ^ flip]), place)
            message = refused(path, lambda: saving.load(path, like))
            assert DAMAGED in message
            assert place < start or "has another checksum than when it was saved" in message
            os.pwrite(file.fileno(), data[place : place + 1], place)
    assert saving.metadata(path) == {"run": "7"}
    assert (saving.load(path, like)["low"] == 1).all()


def test_a_file_that_changes_while_it_is_read(path, good):
    path.write_bytes(good[0])
    names = saving.names(path)
    saving.save(path, tree_of(2))  # another file, that replaces the one that is open
    np.testing.assert_array_equal(names["low"], np.ones((3, 600), "f2"))
    names = saving.names(path)
    assert (names["first"] == 2).all()
    os.truncate(path, path.stat().st_size - 10)
    assert "it has become shorter while it was read" in refused(path, lambda: dict(names))


# -- Made up -----------------------------------------------------------------------------------------------------------


def write(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)


def entry(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


LENGTH, NO_JSON, ENTRY = "its header is said to have ", "its header is no JSON", "its entry 'w' is not a dtype ("
MANY = b"9" * 4299
MADE_UP = [  # a header, the length that it says, and what is said of it
    (b"{}", 1 << 63, f"{LENGTH}9,223,372,036,854,775,808 bytes, and the file"),
    (b"{}", (1 << 64) - 1, LENGTH),
    (b"{}", 1 << 30, f"{LENGTH}1,073,741,824 bytes, and the file has 18"),
    *((text, None, NO_JSON) for text in (b"", b"[]", b"null", b"1e999", b'{"\xff": 1}', b"{}{}")),
    *((text, None, NO_JSON) for text in (b"[" * 200_000, b'{"a":' * 200_000)),
    (b'{"w":{"dtype":"U8","shape":[%b9],"data_offsets":[0,4]}}' % (MANY * 2), None, NO_JSON),
    (b'{"w":' + b"[" * 900 + b"]" * 900 + b"}", None, ENTRY),
    *((text, None, "a name occurs twice") for text in (b'{"w":{"dtype":"F32","dtype":"F32"}}', b'{"w":1,"w":1}')),
    (b'{"__metadata__":{},"__metadata__":{}}', None, "its metadata are not one dictionary of texts"),
    ({"__metadata__": {"a": 1}}, None, "its metadata are not one dictionary of texts"),
    ({"__metadata__": None}, None, "its metadata are not one dictionary of texts"),
    *(({"w": its}, None, ENTRY) for its in (1, {"dtype": "F32"}, entry() | {"code": "x"}, entry(["F32"]))),
    ({"w": entry("F7")}, None, ENTRY),
    *(({"w": entry(shape=its)}, None, ENTRY) for its in (1, ["1"], [1.0], [True], [-1, -1], None)),
    *(({"w": entry(offsets=its)}, None, ENTRY) for its in (None, [0], [-4, 0], [0, 4.0], [0, 4, 8])),
    (b'{"w":{"dtype":"F32","shape":[1e999],"data_offsets":[0,4]}}', None, ENTRY),
    # A product that is 0 or 1 in 64 bits, and shapes that are too large for NumPy, empty or not.
    *(({"w": entry(shape=its, offsets=(0, 0))}, None, "'w'") for its in ([1 << 32, 1 << 32], [0, 1 << 63])),
    *(({"w": entry(shape=its, offsets=(0, 0))}, None, "'w'") for its in ([1 << 31, 0, 1 << 31], [0] * 33)),
    ({"w": entry("U8", [(1 << 64) + 1], (0, 1))}, None, "'w' is U8 of shape"),
    (b'{"w":{"dtype":"U8","shape":[%b],"data_offsets":[0,4]}}' % MANY, None, "'w'"),
    (b'{"w":{"dtype":"U8","shape":[0],"data_offsets":[%b9,%b9]}}' % (MANY, MANY), None, "'w'"),
    ({"w": entry(offsets=[4, 0])}, None, "'w' is F32 of shape [1] in -4 bytes"),
    ({"w": entry(shape=[2])}, None, "'w' is F32 of shape [2] in 4 bytes"),
    ({"w": entry(shape=[3], offsets=[0, 12])}, None, "its arrays end at byte"),
    ({"w": entry(shape=[1 << 28], offsets=[0, 1 << 30])}, None, "its arrays end at byte 1,073,741"),
    ({"w": entry(offsets=[4, 8])}, None, "the array 'w' begins at byte"),
    ({"v": entry(), "w": entry(offsets=[8, 12])}, None, "the array 'w' begins at byte"),
    ({"v": entry(shape=[2], offsets=[0, 8]), "w": entry(offsets=[4, 8])}, None, "the array 'w' begins at byte"),
    ({"v": entry(), "w": entry()}, None, "the array 'w' begins at byte"),
    ({"x" * 100_000: 1}, None, "its entry"),
]


@pytest.mark.parametrize("case", range(len(MADE_UP)))
def test_headers_that_are_made_up(path, case):
    header, length, message = MADE_UP[case]
    write(path, header, bytes(8), length)
    tracemalloc.start()
    try:
        for read in (
            saving.metadata,
            saving.names,
            lambda path: saving.load(path, {}),
            lambda path: saving.plan(path, {}),
        ):
            assert message in refused(path, lambda read=read: read(path))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000 + 30 * path.stat().st_size  # the error and its traceback; the JSON


def lying(path, good, change):
    """The good file with other words in its header, and the checksum that is right for them."""
    header = json.loads(good[0][8 : good[1]])
    said = header["__metadata__"]
    words = json.loads(said["treeparams.header"])
    changed = change(words)
    said["treeparams.header"] = json.dumps(words) if changed is None else changed
    if changed == "":
        del said["treeparams.header"]
    said["treeparams.checksum"] = "0" * 8
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.replace(b"0" * 8, b"%08x" % zlib.crc32(text), 1)
    path.write_bytes(len(text).to_bytes(8, "little") + text + good[0][good[1] :])


LACKING = object()


def setting(*keys_and_value):
    """A change of words that are right: another value below some keys, or none."""
    *keys, last, value = keys_and_value

    def change(words):
        for key in keys:
            words = words[key]
        if value is LACKING:
            del words[last]
        else:
            words[last] = value

    return change


DIVISION = ("states", "state", "divisions", 0)
LIES = [
    *(lambda words, text=text: text for text in ("", "{", "[" * 100_000, "[]", "null", "1e999")),
    *(setting(word, LACKING) for word in ("version", "ties", "states", "marks")),
    *(setting(*each) for each in (("message", 5), ("ties", ["a"]), ("marks", []), ("values", None))),
    *(setting(*each) for each in (("states", []), ("unkeyed", ["Normal", 2]))),
    # Ties to a number, nothing, itself, an array of another shape; a transform that is a number or made up.
    *(setting("ties", "second", its) for its in (5, ["nothing", ""], ["second", ""], ["low", ""])),
    *(setting("ties", "second", its) for its in (["first", 5], ["first", "os.system"])),
    *(setting("ties", name, its) for name, its in (("more", ["second", ""]), ("z", ["first", ""]))),
    setting("ties", "nothing", ["first", ""]),
    # Marks of another word, of keys that are none or stored otherwise, of no dtype or one of objects, texts, fields.
    *(setting("marks", "z", its) for its in ([], {"dtype": "O"}, {"dtype": "object"}, {"dtype": "f4,f4"})),
    *(setting("marks", "z", {"dtype": its}) for its in ("S8", "complex65", None, "complex128")),
    *(setting("marks", "key", {"key": its}) for its in ("nonsense", 5, "rbg")),
    *(setting("marks", "low", its) for its in ({"pickle": "x"}, {"key": "threefry2x32"}, {"dtype": "complex64"})),
    *(
        setting("marks", its)
        for its in ({"first": {"dtype": "complex64"}}, {"state.counts.0": {"dtype": "datetime64"}})
    ),
    *(setting("states", "state", its) for its in (5, {"slots": [], "running": [], "held": []})),
    *(setting("states", "state", "slots", its) for its in (LACKING, [5])),
    *(setting("states", "state", "divisions", its) for its in (LACKING, [], [{}])),
    *(setting("states", "state", "running", its) for its in ([5], [[["a"]]])),
    *(setting(*DIVISION, "owners", "0.trace.a", its) for its in ([7, 2, 0, None], ["0", 2, 0, None])),
    *(setting(*DIVISION, "blocks", 0, [[0, 1], its, False]) for its in ([0, 2], [0, 2, 1])),
    *(setting("values", "epoch", its) for its in (5, ["int", "5", ""], ["int", 5], ["int", "five"])),
    *(setting("values", "epoch", its) for its in (["int", "9" * 5000], ["list", "5"])),
    *(setting("values", "x", [f"numpy.{its}", "00" * 8]) for its in ("f4,f4", "float16", "object")),
    *(setting("values", "x", its) for its in (["numpy.float16", "00"], LACKING)),
    *(setting("values", name, ["int", "5"]) for name in ("first", "second", "nothing")),
]


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize("case", range(len(LIES)))
def test_words_that_lie(path, like, good, case):
    lying(path, good, LIES[case])
    refused(path, lambda: saving.load(path, like))


def test_a_newer_version_is_named(path, like, good):
    lying(path, good, lambda words: None)
    assert (saving.load(path, like)["first"] == 1).all()
    # Whatever else it says: a newer version may say it otherwise.
    lying(path, good, lambda words: json.dumps({"version": 3, "other": 1}))
    said = refused(path, lambda: saving.load(path, like))
    assert "has version 3 of the format of treeparams.saving, but this library reads 1" in said


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
_SIZES = st.lists(st.sampled_from([0, 1, 2, 4, 8, 1 << 31, 1 << 62, 1 << 63, -1]), max_size=3)
_ENTRIES = st.fixed_dictionaries({
    "dtype": st.sampled_from(["F32", "U8", "BF16", "C64", "F8_E4M3", "BOOL"]) | _JSON,
    "shape": _SIZES | _JSON,
    "data_offsets": _SIZES | _JSON,
})


def read_all(path):
    """Reads all that a file has, in each way."""
    saving.metadata(path)
    names = saving.names(path)
    return [names[name] for name in names]


def assert_read_or_refused(path, read):
    try:
        read()
    except ValueError as error:
        is_right = type(error) is ValueError and repr(str(path)) in str(error)
    else:
        is_right = True
    assert is_right


@hypothesis.settings(max_examples=20, deadline=None)
@hypothesis.given(
    header=st.binary(max_size=40) | _JSON | st.dictionaries(st.sampled_from("vw"), _ENTRIES | _JSON),
    data=st.binary(max_size=16),
    length=st.none() | st.integers(0, (1 << 64) - 1),
)
def test_any_header_is_read_or_refused(path, header, data, length):
    write(path, header, data, length)
    assert_read_or_refused(path, lambda: read_all(path))


@pytest.mark.usefixtures("without_type_checks")
@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(data=st.data())
def test_any_words_are_read_or_refused(path, like, good, data):
    others = _JSON | st.sampled_from(["first", "second", "a", "", "float32", "rbg", [], {}, 1])

    def change(words):
        """Another value somewhere in it."""
        node, is_at = words, False
        while not is_at:
            key = data.draw(st.sampled_from(list(node) if isinstance(node, dict) else list(range(len(node)))))
            is_at = not isinstance(node[key], (dict, list)) or not node[key] or data.draw(st.booleans())
            if is_at:
                node[key] = data.draw(others)
            else:
                node = node[key]

    lying(path, good, change)
    planned = lambda: saving.plan(path, like, strict=False)(path)
    for read in (lambda: read_all(path), lambda: saving.load(path, like), planned):
        assert_read_or_refused(path, read)


def test_no_file_stays_open(path, like, good):
    opened = lambda: len(os.listdir("/proc/self/fd"))
    before = opened()
    for data in (good[0], good[0][:-1], good[0][: good[1] - 1]):
        path.write_bytes(data)
        for read in (saving.metadata, lambda path: saving.load(path, like), read_all):
            assert_read_or_refused(path, lambda read=read: read(path))
    saving.save(path, like)
    assert opened() == before
