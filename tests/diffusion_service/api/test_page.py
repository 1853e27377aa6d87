"""The web page as files: what is served, what it may do, and what it weighs. A browser's view is `tests/browser`."""

import re
from pathlib import Path

import diffusion_service
from diffusion_service.api.layers import Access
from diffusion_service.api.page import ASSETS, INDEX, POLICY
from diffusion_service.keys import KeyRing, add_key
from tests.diffusion_service.api.served import Around, Served, error, serve

FOLDER = Path(diffusion_service.__file__).parent / "page"
MAX_BYTES = 200_000


def test_the_page_is_all_of_its_folder_and_weighs_little() -> None:
    names = {path.name for path in FOLDER.iterdir()}
    assert names == {INDEX, *ASSETS}
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < MAX_BYTES


def test_every_file_comes_with_its_type_and_only_once_to_a_browser_that_has_it(tmp_path: Path) -> None:
    async def body(served: Served) -> None:
        for path, name, kind in [("/", INDEX, "text/html; charset=utf-8")] + [
            (f"/page/{name}", name, kind) for name, kind in ASSETS.items()
        ]:
            answer = await served.client.get(path)
            assert (answer.status_code, answer.headers["content-type"]) == (200, kind)
            assert answer.content == (FOLDER / name).read_bytes()
            assert answer.headers["cache-control"] == "no-cache"
            again = await served.client.get(path, headers={"if-none-match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
            head = await served.client.head(path)
            assert (head.status_code, head.headers["etag"]) == (200, answer.headers["etag"])
        for path in ("/page/", "/page/none.js", "/page/../api/page.py", "/page/%2e%2e/app.py"):
            error(await served.client.get(path), 404)

    serve(tmp_path, body)


def test_the_page_may_run_and_load_only_what_this_server_sends(tmp_path: Path) -> None:
    async def body(served: Served) -> None:
        headers = (await served.client.get("/")).headers
        rules = dict(rule.split(" ", 1) for rule in headers["content-security-policy"].split("; "))
        assert headers["content-security-policy"] == POLICY
        assert rules.pop("img-src") == rules.pop("media-src") == "'self' blob:"
        assert {rules.pop(name) for name in ("script-src", "style-src", "connect-src")} == {"'self'"}
        assert rules.pop("require-trusted-types-for") == "'script'"
        assert set(rules.values()) == {"'none'"}
        assert {"default-src", "base-uri", "form-action", "frame-ancestors", "trusted-types"} == set(rules)
        assert headers["x-frame-options"] == "DENY"
        assert headers["cross-origin-opener-policy"] == "same-origin"

    serve(tmp_path, body)


def test_the_page_needs_no_key_and_what_it_asks_for_does(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    add_key(file, "a", ("admin",))

    async def body(served: Served) -> None:
        for prefix in ("", "/h3"):
            for path in ("/", *(f"/page/{name}" for name in ASSETS)):
                assert (await served.client.get(prefix + path)).status_code == 200
            for path in ("/v1/limits", "/page/none.js", "/page/../v1/limits"):
                error(await served.client.get(prefix + path), 401)

    serve(tmp_path / "state", body, around=Around(access=Access(ring=KeyRing(file), prefix="/h3")))


def test_no_file_names_another_server_or_holds_what_the_policy_forbids() -> None:
    html = (FOLDER / INDEX).read_text(encoding="utf-8")
    assert not re.findall(r"<style|\sstyle=|\son\w+=|javascript:|<script(?![^>]*\ssrc=)", html)
    for path in FOLDER.iterdir():
        text = path.read_text(encoding="utf-8")
        assert set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"']*", text)) <= {"http://www.w3.org/2000/svg"}
        assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)
        assert not re.findall(r"@import|url\((?!#)", text)


def test_files_of_the_page_load_each_other_by_names_that_are_there() -> None:
    loaded = set(re.findall(r"(?:href|src)=\"page/([\w.]+)\"", (FOLDER / INDEX).read_text(encoding="utf-8")))
    for path in FOLDER.glob("*.js"):
        loaded |= set(re.findall(r"from \"\./([\w.]+)\"", path.read_text(encoding="utf-8")))
    assert loaded == set(ASSETS)
    # Addresses are relative, so that the page works below a proxy's prefix.
    assert not [
        path.name for path in FOLDER.iterdir() if re.search(r"[\"'`(]/(?:v1|page|health)", path.read_text("utf-8"))
    ]
