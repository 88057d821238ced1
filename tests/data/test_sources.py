import json
import sysconfig
from pathlib import Path

import pytest

from lightning_memopt.data.sources import DataError, find_files, in_validation, read_documents, stdlib_files


def test_standard_library_without_installed_packages_and_tests():
    files = stdlib_files()
    root = Path(sysconfig.get_paths()["stdlib"])
    parts = {part for path in files for part in path.relative_to(root).parts}
    assert "argparse.py" in parts
    assert not parts & {"site-packages", "dist-packages", "test", "__pycache__"}
    assert files == stdlib_files()
    assert all(path.suffix == ".py" for path in files)


def test_files_patterns_and_folders(tmp_path):
    for name in ("a.txt", "b.md", "deep/c.txt", "deep/d.jsonl", "deep/e.py", "odd[1].txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")

    def names(*entries):
        return [path.relative_to(tmp_path).as_posix() for path in find_files([str(tmp_path / e) for e in entries])]

    assert names("deep") == ["deep/c.txt", "deep/d.jsonl"]
    assert names("**/*.txt") == ["a.txt", "deep/c.txt", "odd[1].txt"]
    assert names("b.md", "deep/e.py", "b.md") == ["b.md", "deep/e.py"]
    assert names("odd[1].txt") == ["odd[1].txt"]


@pytest.mark.parametrize("entry", ["missing.txt", "*.nothing", "empty"])
def test_what_matches_nothing_is_named(tmp_path, entry):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"data\.paths") as error:
        find_files([str(tmp_path / entry)])
    assert entry in str(error.value)


def test_documents_of_text_and_jsonl(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.txt").write_bytes(b"caf\xc3\xa9 \xff")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "sub" / "b.jsonl").write_text('{"body": "one"}\n\n{"body": "two", "id": 2}\n{"body": ""}\n')
    documents = list(read_documents(find_files([str(tmp_path)]), field="body"))
    assert documents == [("a.txt", "café \ufffd"), ("sub/b.jsonl#1", "one"), ("sub/b.jsonl#3", "two")]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (json.dumps({"body": "x", "id": 1}), ["line 2", "'text'", "'body'", "data.field"]),
        (json.dumps({"text": 3}), ["line 2", "'text'"]),
        (json.dumps(["text"]), ["line 2", "no fields"]),
        ("{not json", ["line 2", "JSON"]),
    ],
)
def test_a_bad_jsonl_line_is_named(tmp_path, line, words):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"text": "good"}) + "\n" + line + "\n")
    with pytest.raises(DataError) as error:
        list(read_documents([path]))
    for word in [str(path), *words]:
        assert word in str(error.value)


def test_split_is_a_fixed_hash_of_the_name():
    keys = [f"folder/file{i}.py" for i in range(2000)]
    chosen = {key for key in keys if in_validation(key, 0.1)}
    assert 150 < len(chosen) < 250
    assert chosen < {key for key in keys if in_validation(key, 0.2)}
    assert not any(in_validation(key, 0.0) for key in keys)
    # These very values must never change: a changed split would put validation text into training.
    names = [
        "argparse.py",
        "json/decoder.py",
        "os.py",
        "re/_parser.py",
        "ast.py",
        "abc.py",
        "code.py",
        "cgi.py",
    ]
    assert [in_validation(name, 0.5) for name in names] == [
        True,
        True,
        False,
        False,
        False,
        True,
        False,
        False,
    ]


def test_keys_do_not_depend_on_where_the_files_lie(tmp_path):
    for place in ("here", "there"):
        folder = tmp_path / place / "sub"
        folder.mkdir(parents=True)
        (folder / "a.txt").write_text("a")
        (folder.parent / "b.txt").write_text("b")
    keys = [[d.key for d in read_documents(find_files([str(tmp_path / p)]))] for p in ("here", "there")]
    assert keys[0] == keys[1] == ["b.txt", "sub/a.txt"]
