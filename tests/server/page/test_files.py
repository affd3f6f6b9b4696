"""Rules for the files of the chat page."""

import re
from pathlib import Path

STATIC = Path(__file__).resolve().parents[3] / "server" / "static"
FILES = {path.relative_to(STATIC).as_posix(): path for path in sorted(STATIC.rglob("*")) if path.is_file()}
OWN = {
    name: path.read_text() for name, path in FILES.items() if not name.startswith("vendor/") and path.suffix != ".png"
}
SCRIPTS = {name: text for name, text in OWN.items() if name.endswith(".js")}
HTML = OWN["index.html"]


def test_every_address_is_on_this_server() -> None:
    for name, text in OWN.items():
        without_namespaces = text.replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"(https?:)?//[a-z0-9-]+\.[a-z]", without_namespaces), name


def test_referenced_files_exist() -> None:
    for name in re.findall(r'(?:src|href)="static/([^"]+)"', HTML):
        assert name in FILES
    for name, text in SCRIPTS.items():
        for imported in re.findall(r'(?:from|import\() ?"([^"]+)"', text):
            assert (STATIC / name).parent.joinpath(imported).is_file(), (name, imported)
    assert "vendor/stix-two-math.woff2" in FILES


def test_every_module_is_used() -> None:
    used = {"js/app.js", "theme.js"}
    for name, text in SCRIPTS.items():
        for imported in re.findall(r'from "([^"]+)"', text):
            used.add((STATIC / name).parent.joinpath(imported).resolve().relative_to(STATIC).as_posix())
    assert set(SCRIPTS) <= used


def test_no_inline_code_so_that_a_strict_policy_holds() -> None:
    assert not re.search(r"<script(?![^>]*\ssrc=)|<style|\sstyle=|\son[a-z]+=", HTML)
    policy = re.search(r'content="(default-src[^"]+)"', HTML)
    assert policy is not None
    directives = dict(each.strip().partition(" ")[::2] for each in policy[1].split(";"))
    assert directives["default-src"] == "'none'"
    assert directives["script-src"] == directives["style-src"] == directives["connect-src"] == "'self'"
    assert directives["require-trusted-types-for"] == "'script'"


def test_text_never_becomes_markup_in_our_own_code() -> None:
    for name, text in SCRIPTS.items():
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            name
        )


def test_ids_in_the_scripts_exist_once_in_the_page() -> None:
    ids = re.findall(r'\sid="([^"]+)"', HTML)
    assert len(ids) == len(set(ids))
    for name, text in SCRIPTS.items():
        assert set(re.findall(r'\$\("([^"]+)"\)', text)) <= set(ids), name
    assert set(re.findall(r'(?:\sfor|aria-describedby|aria-labelledby|aria-controls|href)="#?([a-z-]+)"', HTML)) - {
        "docs",
        "metrics",
        "tools-help tools-error",
        "key-help key-error",
    } <= set(ids)


def test_the_page_is_small() -> None:
    assert sum(len(text.encode()) for text in OWN.values()) < 190_000  # 180 until images came
    assert sum(path.stat().st_size for path in FILES.values()) < 1_300_000


def test_libraries_are_listed_with_their_licences() -> None:
    listed = FILES["vendor/README.md"].read_text()
    licences = FILES["vendor/LICENSES.txt"].read_text()
    for name in FILES:
        if name.startswith("vendor/") and not name.endswith((".md", ".txt")):
            assert f"`{Path(name).name}`" in listed, name
    for package, version in re.findall(r"\b([\w@/.-]+) (\d+\.\d+\.\d+)", listed):
        assert f"{package} {version}" in licences, package
