"""Chinese pages and texts: the same code as in English, and the words of docs/zh/terms.md."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from tests.test_docs import ROOT, fences

FOLDER = ROOT / "docs" / "zh"
TRANSLATED = sorted(page.name for page in FOLDER.glob("*.md") if page.name != "terms.md")
RULED_OUT = {
    "三元组": "三元语法", "权重质量": "权重之和", "注意力质量": "权重之和", "概率质量": "权重之和",
    "步长就是权重": "系数就是权重", "向前看": "前面的", "向后看": "后面的", "什么都不能看": "没有可关注键的行",
    "笔记本组件": "Jupyter 小组件", "对方": "加速比", "我们": "regard",
    "遮盖": "掩码", "遮住": "屏蔽", "标准化": "归一化", "说法": "论断", "所寻之物": "匹配的键", "对数和": "log-sum-exp",
}  # fmt: skip
CHINESE = re.compile("[\u4e00-\u9fff]")
THIS = Path(__file__).relative_to(ROOT).as_posix()


def chinese_texts() -> list[Path]:
    """Return the files of the project that contain Chinese, apart from tests."""
    listed = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard"], capture_output=True, text=True
    ).stdout.split("\n")
    files = [ROOT / name for name in listed if name and not name.startswith("tests/")]
    endings = {".md", ".py", ".json", ".js", ".html", ".yml", ".svg"}
    return [
        file for file in files if file.suffix in endings and file.exists() and CHINESE.search(file.read_text("utf-8"))
    ]


def test_ruled_out_words_occur_nowhere() -> None:
    actual = chinese_texts()
    names = {file.name for file in actual}
    assert {"README.zh.md", "words.json", "live_words.json", "mechanism.py", "terms.md", "tutorial.md"} <= names
    for file in actual:
        text = file.read_text("utf-8")
        for word, better in RULED_OUT.items():
            assert word not in text, f"{file.relative_to(ROOT)} says {word}; docs/zh/terms.md says {better}"


@pytest.mark.parametrize("name", TRANSLATED)
def test_the_code_is_that_of_the_english_page(name: str) -> None:
    pairs = [list(fences((folder / name).read_text("utf-8"))) for folder in (FOLDER.parent, FOLDER)]
    for english, chinese in zip(*pairs, strict=True):
        assert (english.language, english.note) == (chinese.language, chinese.note)
        if english.language == "python":
            assert program(english.text) == program(chinese.text), f"docs/zh/{name}:{chinese.line}"
        elif english.language == "text":
            assert english.text == chinese.text
        else:
            assert re.sub(r" --lang zh", "", chinese.text) == english.text


@pytest.mark.parametrize("name", TRANSLATED)
def test_both_pages_have_the_same_parts(name: str) -> None:
    english, chinese = ((folder / name).read_text("utf-8") for folder in (FOLDER.parent, FOLDER))
    for mark in ("## ", "- ", "| "):
        counts = [sum(line.startswith(mark) for line in text.splitlines()) for text in (english, chinese)]
        assert counts[0] == counts[1], f"{name}: {counts} lines start with {mark!r}"
    assert f"](zh/{name})" in english
    assert f"](../{name})" in chinese
    assert len(CHINESE.findall(chinese)) > 500


def program(text: str) -> str:
    """Return the program of a block without comments and docstrings."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
            node.body = node.body[1:]
    return ast.dump(tree).replace("从零开始", "From zero")
