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
    return {
        "first": weight,
        "second": weight,
        "z": np.full(2, fill, np.complex64),
        "low": np.full((3, 600), fill, "f2"),
    }


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("faults") / "model.safetensors"


@pytest.fixture(scope="module")
def like():
    tx = optim.trainable(optax.sgd(0.1, momentum=0.9))
    return tree_of(0) | {
        "epoch": 5,
        "x": np.float16(2),
        "key": np.zeros(2, "u4"),
        "state": tx.init({"a": np.ones(2, "f"), "b": np.ones((), "f")}),
    }


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


def test_cut_anywhere(path, like, good):
    data, start = good
    path.write_bytes(data)
    assert (saving.load(path, like)["first"] == 1).all()
    places = [*range(start), *np.linspace(start, len(data) - 1, 200).astype(int)]
    for place in sorted(places, reverse=True):
        os.truncate(path, place)
        assert "is no safetensors file, or damaged: " in refused(path, lambda: saving.load(path, like))
    path.write_bytes(data + b"\0")
    assert f"its arrays end at byte {len(data):,}, and the file has {len(data) + 1:,}" in refused(
        path, lambda: saving.metadata(path)
    )


def test_one_byte_flipped_anywhere(path, like, good):
    data, start = good
    path.write_bytes(data)
    places = [*range(start), *np.linspace(start, len(data) - 1, 60).astype(int)]
    with open(path, "r+b", buffering=0) as file:
        for count, place in enumerate(places):
            flip = [1 << count % 8, 0xFF][count // 8 % 2]
            os.pwrite(file.fileno(), bytes([data[place] ^ flip]), place)
            message = refused(path, lambda: saving.load(path, like))
            assert "is no safetensors file, or damaged: " in message
            assert place < start or "has another checksum than when it was saved" in message
            os.pwrite(file.fileno(), data[place : place + 1], place)
    assert saving.metadata(path) == {"run": "7"}
    assert (saving.load(path, like)["low"] == 1).all()


def test_it_becomes_shorter_while_it_is_read(path, good):
    path.write_bytes(good[0])
    names = saving.names(path)
    np.testing.assert_array_equal(names["low"], np.ones((3, 600), "f2"))
    os.truncate(path, good[1] + 10)
    assert "it has become shorter while it was read" in refused(path, lambda: names["low"])


def test_one_that_is_replaced_while_it_is_read_stays_what_it_was(path):
    saving.save(path, tree_of(1))
    names = saving.names(path)
    saving.save(path, tree_of(2))
    assert (names["first"] == 1).all()
    assert (saving.names(path)["first"] == 2).all()


# -- Made up -----------------------------------------------------------------------------------------------------------


def write(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)


def entry(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


MANY = b"9" * 4299
MADE_UP = {
    "a length of 2^63": (b"{}", 1 << 63, "its header is said to have 9,223,372,036,854,775,808 bytes, and the file"),
    "a length of 2^64 - 1": (b"{}", (1 << 64) - 1, "its header is said to have 18,446,744,073,709,551,615 bytes"),
    "a length of a gigabyte": (b"{}", 1 << 30, "its header is said to have 1,073,741,824 bytes, and the file has 18"),
    "no header": (b"", None, "its header is no JSON"),
    "a list": (b"[]", None, "its header is no JSON object"),
    "null": (b"null", None, "its header is no JSON object"),
    "a number": (b"1e999", None, "its header is no JSON object"),
    "not UTF-8": (b'{"\xff": 1}', None, "its header is no JSON"),
    "two objects": (b"{}{}", None, "its header is no JSON"),
    "deep lists": (b"[" * 200_000, None, "its header is no JSON"),
    "deep objects": (b'{"a":' * 200_000, None, "its header is no JSON"),
    "deep in an entry": (b'{"w":' + b"[" * 900 + b"]" * 900 + b"}", None, "its entry 'w' is not a dtype, a shape"),
    "one name twice": (b'{"w":{"dtype":"F32","dtype":"F32"}}', None, "a name occurs twice"),
    "metadata of a number": ({"__metadata__": {"a": 1}}, None, "its metadata are not a dictionary of texts"),
    "metadata null": ({"__metadata__": None}, None, "its metadata are not a dictionary of texts"),
    "an entry that is a number": ({"w": 1}, None, "its entry 'w' is not a dtype, a shape and two offsets"),
    "an entry without a shape": ({"w": {"dtype": "F32"}}, None, "its entry 'w' is not a dtype, a shape and two"),
    "an entry with more": ({"w": entry() | {"code": "x"}}, None, "its entry 'w' is not a dtype, a shape and two"),
    "an unknown dtype": ({"w": entry("F7")}, None, "'w' is of the dtype 'F7', which is none of BOOL, "),
    "a dtype that is a list": ({"w": entry(["F32"])}, None, r"'w' is of the dtype \['F32'\], which is none of BOOL"),
    "a shape that is a number": ({"w": entry(shape=1)}, None, "the shape of 'w' is no list of"),
    "a shape of text": ({"w": entry(shape=["1"])}, None, "the shape of 'w' is no list of"),
    "a shape of a float": ({"w": entry(shape=[1.0])}, None, "the shape of 'w' is no list of"),
    "a shape of infinity": (b'{"w":{"dtype":"F32","shape":[1e999],"data_offsets":[0,4]}}', None, "the shape of 'w' is"),
    "a shape of true": ({"w": entry(shape=[True])}, None, "the shape of 'w' is no list of"),
    "a negative shape": ({"w": entry(shape=[-1, -1])}, None, "the shape of 'w' is no list of"),
    "too many axes": ({"w": entry(shape=[1] * 1000)}, None, "the shape of 'w' is no list of at most 32 sizes"),
    "a product that is 0 in 64 bits": ({"w": entry(shape=[1 << 32, 1 << 32], offsets=(0, 0))}, None, "'w'"),
    "a product that is 1 in 64 bits": ({"w": entry("U8", [(1 << 64) + 1], (0, 1))}, None, "'w'"),
    "too large for NumPy, and empty": ({"w": entry(shape=[0, 1 << 63], offsets=(0, 0))}, None, "'w'"),
    "too large, and empty": ({"w": entry(shape=[1 << 31, 0, 1 << 31], offsets=(0, 0))}, None, "'w'"),
    "long numbers": (b'{"w":{"dtype":"U8","shape":[%b],"data_offsets":[0,4]}}' % MANY, None, "'w'"),
    "longer numbers": (b'{"w":{"dtype":"U8","shape":[%b9],"data_offsets":[0,4]}}' % (MANY * 2), None, "is no JSON"),
    "long offsets": (b'{"w":{"dtype":"U8","shape":[0],"data_offsets":[%b9,%b9]}}' % (MANY, MANY), None, "'w'"),
    "offsets that are null": ({"w": entry(offsets=None)}, None, "the offsets of 'w' are not two numbers"),
    "one offset": ({"w": entry(offsets=[0])}, None, "the offsets of 'w' are not two numbers"),
    "negative offsets": ({"w": entry(offsets=[-4, 0])}, None, "the offsets of 'w' are not two numbers"),
    "offsets that go back": ({"w": entry(offsets=[4, 0])}, None, r"'w' is F32 of shape \[1\] in -4 bytes"),
    "another size": ({"w": entry(shape=[2])}, None, r"'w' is F32 of shape \[2\] in 4 bytes"),
    "beyond the end": ({"w": entry(shape=[3], offsets=[0, 12])}, None, "its arrays end at byte .* and the file has"),
    "a gigabyte": ({"w": entry(shape=[1 << 28], offsets=[0, 1 << 30])}, None, "its arrays end at byte 1,073,741"),
    "a gap before": ({"w": entry(offsets=[4, 8])}, None, "the array 'w' begins at byte"),
    "a gap between": ({"v": entry(), "w": entry(offsets=[8, 12])}, None, "the array 'w' begins at byte"),
    "overlapping": ({"v": entry(shape=[2], offsets=[0, 8]), "w": entry(offsets=[4, 8])}, None, "the array 'w' begins"),
    "one in another": ({"v": entry(), "w": entry()}, None, "the array 'w' begins at byte"),
    "a long name": ({"x" * 100_000: 1}, None, "its entry"),
}


@pytest.mark.parametrize("case", MADE_UP)
def test_headers_that_are_made_up(path, case):
    header, length, message = MADE_UP[case]
    write(path, header, bytes(8), length)
    tracemalloc.start()
    try:
        for read in (saving.metadata, saving.names, lambda path: saving.load(path, {}), lambda p: saving.plan(p, {})):
            refused(path, lambda read=read: read(path))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000 + 30 * path.stat().st_size  # the error and its traceback; the JSON
    with pytest.raises(ValueError, match=message):
        saving.metadata(path)


@pytest.mark.parametrize("size", range(9))
def test_hardly_a_file(path, size):
    path.write_bytes(bytes(size))
    assert "is no safetensors file, or damaged: its header is" in refused(path, lambda: saving.metadata(path))


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


STATE = {"slots": [], "running": [], "held": []}
division = lambda words: words["states"]["state"]["divisions"][0]
LIES = {
    "no words": lambda words: "",
    "no JSON": lambda words: "{",
    "deep": lambda words: "[" * 100_000,
    "a list": lambda words: "[]",
    "null": lambda words: "null",
    "a number": lambda words: "1e999",
    "no version": lambda words: words.pop("version") and None,
    "no ties": lambda words: words.pop("ties") and None,
    "no states": lambda words: words.pop("states") and None,
    "no marks": lambda words: words.pop("marks") and None,
    "a message of a number": lambda words: words.update(message=5),
    "ties that are a list": lambda words: words.update(ties=["a"]),
    "a tie to a number": lambda words: words["ties"].update(second=5),
    "a tie to nothing": lambda words: words["ties"].update(second=["nothing", ""]),
    "a tie to a tie": lambda words: words["ties"].update(more=["second", ""]),
    "a tie to itself": lambda words: words["ties"].update(second=["second", ""]),
    "a tie of an array": lambda words: words["ties"].update(z=["first", ""]),
    "a tie of what is not there": lambda words: words["ties"].update(nothing=["first", ""]),
    "a tie to an array of another shape": lambda words: words["ties"].update(second=["low", ""]),
    "a transform that is a number": lambda words: words["ties"].update(second=["first", 5]),
    "a transform that is made up": lambda words: words["ties"].update(second=["first", "os.system"]),
    "marks that are a list": lambda words: words.update(marks=[]),
    "a mark that is a list": lambda words: words["marks"].update(z=[]),
    "a mark of another word": lambda words: words["marks"].update(low={"pickle": "x"}),
    "a key of nonsense": lambda words: words["marks"].update(key={"key": "nonsense"}),
    "a key of a number": lambda words: words["marks"].update(key={"key": 5}),
    "a key of floats": lambda words: words["marks"].update(low={"key": "threefry2x32"}),
    "a key of other words": lambda words: words["marks"].update(key={"key": "rbg"}),
    "objects": lambda words: words["marks"].update(z={"dtype": "O"}),
    "objects in full": lambda words: words["marks"].update(z={"dtype": "object"}),
    "fields": lambda words: words["marks"].update(z={"dtype": "f4,f4"}),
    "text": lambda words: words["marks"].update(z={"dtype": "S8"}),
    "times": lambda words: words["marks"].update({"state.counts.0": {"dtype": "datetime64"}}),
    "no dtype": lambda words: words["marks"].update(z={"dtype": "complex65"}),
    "a dtype that is null": lambda words: words["marks"].update(z={"dtype": None}),
    "complex numbers of another size": lambda words: words["marks"].update(z={"dtype": "complex128"}),
    "complex numbers of three": lambda words: words["marks"].update(low={"dtype": "complex64"}),
    "complex numbers of no pairs": lambda words: words["marks"].update(first={"dtype": "complex64"}),
    "nodes without keys that are a list": lambda words: words.update(unkeyed=["Normal", 2]),
    "a node without keys that is a text": lambda words: words.update(unkeyed={"dist": "Normal"}),
    "states that are a list": lambda words: words.update(states=[STATE]),
    "a state that is a number": lambda words: words["states"].update(state=5),
    "a state of nothing": lambda words: words["states"].update(state=STATE),
    "a state without slots": lambda words: words["states"]["state"].pop("slots") and None,
    "slots of a number": lambda words: words["states"]["state"].update(slots=[5]),
    "no divisions": lambda words: words["states"]["state"].pop("divisions") and None,
    "divisions too few": lambda words: words["states"]["state"].update(divisions=[]),
    "a division of nothing": lambda words: words["states"]["state"].update(divisions=[{}]),
    "an owner in no block": lambda words: division(words)["owners"].update({"0.trace.a": [7, 2, 0, None]}),
    "an owner of text": lambda words: division(words)["owners"].update({"0.trace.a": ["0", 2, 0, None]}),
    "starts too few": lambda words: division(words)["blocks"].__setitem__(0, [[0, 1], [0, 2], False]),
    "starts that go back": lambda words: division(words)["blocks"].__setitem__(0, [[0, 1], [0, 2, 1], False]),
    "no restructures": lambda words: words.pop("restructures", None) and None,
    "running of a number": lambda words: words["states"]["state"].update(running=[5]),
    "values that are a list": lambda words: words.update(values=[["int", "5"]]),
    "values that are null": lambda words: words.update(values=None),
    "a value that is a number": lambda words: words["values"].update(epoch=5),
    "a value of three": lambda words: words["values"].update(epoch=["int", "5", ""]),
    "a value of a number": lambda words: words["values"].update(epoch=["int", 5]),
    "a value of nonsense": lambda words: words["values"].update(epoch=["int", "five"]),
    "a value with spaces": lambda words: words["values"].update(epoch=["int", " 5"]),
    "a value of too many digits": lambda words: words["values"].update(epoch=["int", "9" * 5000]),
    "a value of another type": lambda words: words["values"].update(epoch=["list", "5"]),
    "a value of objects": lambda words: words["values"].update(x=["numpy.object", "00" * 8]),
    "a value of fields": lambda words: words["values"].update(x=["numpy.f4,f4", "00" * 8]),
    "a value of too few bytes": lambda words: words["values"].update(x=["numpy.float16", "00"]),
    "a value of two": lambda words: words["values"].update(x=["numpy.float16", "0000" * 2]),
    "a value at an array": lambda words: words["values"].update(first=["int", "5"]),
    "a value at a tie": lambda words: words["values"].update(second=["int", "5"]),
    "a value at nothing": lambda words: words["values"].update(nothing=["int", "5"]),
    "a value too few": lambda words: words["values"].pop("x") and None,
    "running of lists": lambda words: words["states"]["state"].update(running=[[["a"]]]),
}


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize("case", LIES)
def test_words_that_lie(path, like, good, case):
    lying(path, good, lambda words: None)
    assert (saving.load(path, like)["first"] == 1).all()
    lying(path, good, LIES[case])
    refused(path, lambda: saving.load(path, like))


def test_a_newer_version_is_named(path, like, good):
    lying(path, good, lambda words: words.update(version=2))
    assert "has version 2 of the format of treeparams.saving" in refused(path, lambda: saving.load(path, like))
    # Whatever else it says: a newer version may say it otherwise.
    lying(path, good, lambda words: json.dumps({"version": 3, "other": 1}))
    assert "has version 3" in refused(path, lambda: saving.load(path, like))


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
        message = str(error) if type(error) is ValueError else ""
    else:
        return
    assert repr(str(path)) in message


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(
    header=st.binary(max_size=40) | _JSON | st.dictionaries(st.sampled_from("vw"), _ENTRIES | _JSON),
    data=st.binary(max_size=16),
    length=st.none() | st.integers(0, (1 << 64) - 1),
)
def test_any_header_is_read_or_refused(path, header, data, length):
    write(path, header, data, length)
    assert_read_or_refused(path, lambda: read_all(path))
    path.write_bytes(data)
    assert_read_or_refused(path, lambda: read_all(path))


@pytest.mark.usefixtures("without_type_checks")
@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(data=st.data())
def test_any_words_are_read_or_refused(path, like, good, data):
    def change(words):
        """Another value somewhere in it."""
        node = words
        while True:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            key = data.draw(st.sampled_from(keys))
            if not isinstance(node[key], (dict, list)) or not node[key] or data.draw(st.booleans()):
                node[key] = data.draw(
                    _JSON | st.sampled_from(["first", "second", "a", "", "float32", "rbg", [], {}, 1])
                )
                return
            node = node[key]

    lying(path, good, change)
    assert_read_or_refused(path, lambda: [read_all(path), saving.load(path, like), saving.plan(path, like)(path)])


def test_no_file_stays_open(path, like, good):
    opened = lambda: len(os.listdir("/proc/self/fd"))
    before = opened()
    for data in (good[0], good[0][:-1], good[0][: good[1] - 1]):
        path.write_bytes(data)
        for read in (saving.metadata, lambda path: saving.load(path, like), read_all):
            assert_read_or_refused(path, lambda read=read: read(path))
    saving.save(path, like)
    assert opened() == before
