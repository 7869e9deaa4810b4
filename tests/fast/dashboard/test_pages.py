"""The page's files: what is sent, with which headers, and that no other host is asked."""

from __future__ import annotations

import asyncio
import re
from importlib import resources

import httpx
import pytest
from fastapi import FastAPI

from sgl_esft.dashboard.pages import FILES, POLICY, ROOT_PATH, add_routes, read_pages
from sgl_esft.http.classes import TABLE, RouteClass

PAGES = read_pages()
SCRIPTS = {path: page.body.decode() for path, page in PAGES.items() if path.endswith(".js")}
# What makes HTML or code out of text, or keeps a key longer than the tab.
UNSAFE = re.compile(
    r"\b(innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval|Function|DOMParser|srcdoc"
    r"|setHTML\w*|createContextualFragment|localStorage|document\.cookie)\b"
)


@pytest.fixture
def app() -> FastAPI:
    found = FastAPI()
    add_routes(found)
    return found


def get(app: FastAPI, path: str, method: str = "GET", **headers: str) -> httpx.Response:
    async def call() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://testserver") as client:
            return await client.request(method, path, headers=headers)

    return asyncio.run(call())


@pytest.mark.parametrize("path", sorted(FILES))
def test_every_file_is_sent_with_the_policy(app: FastAPI, path: str) -> None:
    answer = get(app, path)
    assert answer.status_code == 200
    assert answer.content == PAGES[path].body
    assert answer.headers["content-type"].split(";")[0] == PAGES[path].media_type.split(";")[0]
    assert answer.headers["content-security-policy"] == POLICY
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-cache"


def test_what_a_browser_has_already_is_not_sent_again(app: FastAPI) -> None:
    etag = get(app, ROOT_PATH).headers["etag"]
    for value in (etag, f'"other", W/{etag}'):
        again = get(app, ROOT_PATH, **{"If-None-Match": value})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == etag
    assert get(app, ROOT_PATH, **{"If-None-Match": '"other"'}).status_code == 200
    assert len({page.etag for page in PAGES.values()}) == len(PAGES)


def test_methods_and_paths_are_fixed(app: FastAPI) -> None:
    head = get(app, ROOT_PATH, "HEAD")
    assert (head.status_code, head.content) == (200, b"")
    assert get(app, ROOT_PATH, "POST").status_code == 405
    for path in ("/pages.py", "/../pages.py", "/%2e%2e/pages.py", "/static/main.js"):
        assert get(app, ROOT_PATH + path).status_code == 404, path
    assert get(app, "/openapi.json").json()["paths"] == {}


def test_every_file_of_the_folder_has_a_path_and_a_public_class() -> None:
    folder = resources.files("sgl_esft.dashboard") / "static"
    assert sorted(FILES.values()) == sorted(each.name for each in folder.iterdir())
    assert {TABLE[path].route_class for path in FILES} == {RouteClass.PUBLIC}


def test_the_policy_names_no_other_host_and_no_inline_code() -> None:
    assert "http" not in POLICY
    assert "unsafe" not in POLICY
    assert "default-src 'none'" in POLICY
    html = PAGES[ROOT_PATH].body.decode()
    assert not re.search(r"\son\w+=|\sstyle=|<style", html), "the policy would ignore it"
    assert set(re.findall(r'(?:src|href)="([^"#]+)"', html)) <= set(FILES)
    assert re.findall(r"<script[^>]*>([^<]*)</script>", html) == [""]


@pytest.mark.parametrize("path", sorted(SCRIPTS))
def test_a_script_imports_what_is_there_and_makes_no_html(path: str) -> None:
    source = SCRIPTS[path]
    code = "\n".join(line.split("//")[0] for line in source.splitlines())
    assert UNSAFE.findall(code) == []
    imported = re.findall(r'from "\./([^"]+)"', source)
    assert {f"{ROOT_PATH}/{name}" for name in imported} <= set(FILES)
    assert source.count("\n") <= 250


def test_every_script_is_used() -> None:
    reached, open_paths = {f"{ROOT_PATH}/main.js"}, [f"{ROOT_PATH}/main.js"]
    while open_paths:
        for name in re.findall(r'from "\./([^"]+)"', SCRIPTS[open_paths.pop()]):
            path = f"{ROOT_PATH}/{name}"
            if path not in reached:
                reached.add(path)
                open_paths.append(path)
    assert reached == set(SCRIPTS)


def test_no_other_host_is_named() -> None:
    for path, page in PAGES.items():
        hosts = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"']*", page.body.decode()))
        assert hosts <= {"http://www.w3.org/2000/svg"}, path


def test_the_page_names_every_element_that_scripts_look_for() -> None:
    html = PAGES[ROOT_PATH].body.decode()
    ids = set(re.findall(r'\sid="([^"]+)"', html))
    wanted = {
        name for source in SCRIPTS.values() for name in re.findall(r'byId\("([^"]+)"', source)
    }
    wanted |= {name for text in SCRIPTS.values() for name in re.findall(r'Panel\("([^"]+)"', text)}
    assert wanted - ids == set()
    assert len(ids) == html.count(' id="')
