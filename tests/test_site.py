"""The course's website as a browser shows it: opened from its files, without network, on a desk and on a phone.

Needs Playwright for Python (make test-site has it) and a Chromium of the system, on Debian `apt-get install chromium`.
"""

import json
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[1]
BOOK = ROOT / "notebooks"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
MISSING = [name for name in ("myst_nb", "furo", "latex2mathml") if find_spec(name) is None]
NO_BROWSER = [name for name in ("playwright",) if find_spec(name) is None] + ["chromium"] * (CHROMIUM is None)

pytestmark = pytest.mark.skipif(MISSING != [], reason=f"needs {', '.join(MISSING)}: run make test-site")
browser = pytest.mark.skipif(
    NO_BROWSER != [],
    reason=f"needs {' and '.join(NO_BROWSER)}: run make test-site where Chromium is installed",
)
SCREENS = {"desk": {"width": 1280, "height": 900}, "phone": {"width": 390, "height": 844}}

# What the page looks like from inside. Folded answers are opened first: what is in them must be readable too.
LOOK = r"""async width => {
    document.querySelectorAll('details').forEach(d => { d.open = true })
    const broken = [], images = [...document.images]
    for (const i of images) await i.decode().catch(() => broken.push(i.src))
    const box = e => e.getBoundingClientRect()
    const article = document.querySelector('article')
    // the block that scrolls with e in it, if that is not the page itself
    const scrolls = e => { for (; e && !e.contains(article); e = e.parentElement)
        if (['auto', 'scroll'].includes(getComputedStyle(e).overflowX) && box(e).right <= width + 1) return true }
    const small = [], cut = [], tex = []
    const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT)
    while (walk.nextNode()) {
        const text = walk.currentNode.data.trim(), e = walk.currentNode.parentElement
        if (!text || e.closest('script, style, svg') || !e.checkVisibility()) continue
        const size = parseFloat(getComputedStyle(e).fontSize)
        // exponents and indices are smaller than their line, in formulas and beside them
        if (size < 14 && !e.closest('math, sup, sub')) small.push(`${size} px: ${text.slice(0, 40)}`)
        const left = e.closest('math') ? /[$&\\]/ : /\$|\\[a-zA-Z]+/
        if (!e.closest('pre, code') && left.test(text)) tex.push(text.slice(0, 60))
        const range = document.createRange(); range.selectNodeContents(walk.currentNode)
        if (article.contains(e) && box(range).right > width + 1 && !scrolls(e)) cut.push(text.slice(0, 40))
    }
    return {
        broken, small, cut, tex,
        empty: images.filter(i => !(i.naturalWidth > 0 && box(i).width > 0)).map(i => i.src),
        figures: article.querySelectorAll('img').length,
        wide: images.filter(i => box(i).left < 0 || box(i).right > width + 1).map(i => i.src),
        formulas: [...article.querySelectorAll('math')].map(m => box(m).width * box(m).height),
        over: [document.documentElement, document.body, document.querySelector('.content')]
            .map(e => e.scrollWidth - Math.min(e.clientWidth, width)),
        ids: [...document.querySelectorAll('[id]')].map(e => e.id),
        links: [...document.querySelectorAll('a[href]')].map(a => a.href),
    }
}"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of a site built for these tests."""
    folder = tmp_path_factory.mktemp("built")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "-b", "html", "-d", folder / "trees", BOOK]
    done = subprocess.run([*command, folder / "site"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "site"


@pytest.fixture(scope="module")
def chromium():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=CHROMIUM)
        yield running
        running.close()


def watched(context):
    """A new page, the URLs it asks for, and what goes wrong in it."""
    page, asked, wrong = context.new_page(), [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("requestfailed", lambda request: wrong.append(f"{request.url}: {request.failure}"))
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    return page, asked, wrong


@pytest.fixture(scope="module")
def seen(site, chromium):
    """{screen: {page: what the browser saw there}}; each page is opened once, and then resized."""
    context = chromium.new_context(offline=True, reduced_motion="reduce", is_mobile=True, has_touch=True)
    found = {screen: {} for screen in SCREENS}
    for path in sorted(site.rglob("*.html")):
        page, asked, wrong = watched(context)
        for i, (screen, size) in enumerate(SCREENS.items()):
            page.set_viewport_size(size)
            if i == 0:
                page.goto(path.as_uri(), wait_until="load")
            look = page.evaluate(LOOK, size["width"])
            found[screen][path.relative_to(site).as_posix()] = look | {"asked": asked, "wrong": wrong}
        page.close()
    context.close()
    return found


def bad(seen, key, screens=tuple(SCREENS)):
    """The pages where a list that should be empty is not."""
    return {(s, name): look[key] for s in screens for name, look in seen[s].items() if look[key]}


def sources():
    """{page of the site: (its text cells, its number of stored figures)}"""
    found = {}
    for path in sorted([*BOOK.glob("*.ipynb"), *BOOK.glob("*.md"), *BOOK.glob("pages/*.md")]):
        text = path.read_text(encoding="utf-8")
        cells = json.loads(text)["cells"] if path.suffix == ".ipynb" else []
        texts = ["".join(c["source"]) for c in cells if c["cell_type"] == "markdown"] if cells else [text]
        figures = sum("image/png" in o.get("data", {}) for c in cells for o in c.get("outputs", ()))
        found[path.relative_to(BOOK).with_suffix(".html").as_posix()] = texts, figures
    return found


def count(kind, texts):
    """How many tokens there are in Markdown whose type begins with kind, by the rules of the site's own reader."""
    from markdown_it import MarkdownIt
    from mdit_py_plugins.dollarmath import dollarmath_plugin

    reader = MarkdownIt("commonmark").enable("table").use(dollarmath_plugin)
    tokens = [token for text in texts for token in reader.parse(text)]
    return sum(t.type.startswith(kind) for token in tokens for t in (token, *(token.children or ())))


def test_no_file_names_another_machine(site):
    for path in site.rglob("*.html"):
        page = path.read_text(encoding="utf-8")
        fetched = re.findall(r"<(?:script|img|link|iframe)\b[^>]*(?:src|href)=\"(?:https?:)?//[^\"]*", page)
        assert not fetched, f"{path.name}: {fetched}"
    for path in site.rglob("*.css"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"(?:url\(|@import )[\"']?(?:https?:)?//", text), path.name


def test_every_source_has_its_page(site):
    assert [name for name in sources() if not (site / name).is_file()] == []


@browser
def test_pages_load_without_network_and_without_errors(seen):
    assert all("index.html" in pages and "01_number_formats.html" in pages for pages in seen.values())
    asked = {url for pages in seen.values() for look in pages.values() for url in look["asked"]}
    assert asked and {url for url in asked if urlsplit(url).scheme not in ("file", "data")} == set()
    assert bad(seen, "wrong") == {}


@browser
def test_formulas_are_set(seen):
    expected = {name: count("math_", texts) for name, (texts, _) in sources().items()}
    assert sum(expected.values()) > 10
    for screen, pages in seen.items():
        shown = {name: len(pages[name]["formulas"]) for name in expected}
        assert shown == expected, screen
        assert [name for name, look in pages.items() if not all(look["formulas"])] == [], "of no size"
    assert bad(seen, "tex") == {}, "TeX that no one has set"


@browser
def test_figures_are_shown(seen):
    expected = {name: figures + count("image", texts) for name, (texts, figures) in sources().items()}
    assert sum(expected.values()) > 0
    for screen, pages in seen.items():
        assert {name: pages[name]["figures"] for name in expected} == expected, screen
    assert bad(seen, "broken") == {} and bad(seen, "empty") == {}


@browser
@pytest.mark.parametrize("screen", SCREENS)
def test_it_fits_the_screen(seen, screen):
    """No page scrolls sideways; what is wider (code, tables, formulas) scrolls in itself; figures are never wider."""
    over = {name: look["over"] for name, look in seen[screen].items() if max(look["over"]) > 0}
    assert over == {}
    assert bad(seen, "cut", [screen]) == {} and bad(seen, "wide", [screen]) == {}


@browser
def test_text_is_large_enough(seen):
    assert bad(seen, "small") == {}


@browser
def test_links_lead_somewhere(seen, site):
    pages, dead = seen["desk"], []
    for name, look in pages.items():
        for url in map(urlsplit, look["links"]):
            if url.scheme == "file":
                path = Path(unquote(url.path))
                inside = path.relative_to(site).as_posix() if path.is_relative_to(site) else None
                there = inside and path.is_file()
                if not there or url.fragment and unquote(url.fragment) not in [*pages[inside]["ids"], ""]:
                    dead.append((name, url.geturl()))
            elif url.scheme != "https":
                dead.append((name, url.geturl()))
    assert dead == []


@browser
def test_a_link_to_code_leads_to_the_line(chromium, site):
    page, _, wrong = watched(chromium.new_context(offline=True, reduced_motion="reduce"))
    page.goto((site / "01_number_formats.html").as_uri())
    page.click("article a:has-text('minamp.formats.ulp')")
    target = page.locator(":target")
    assert target.text_content().startswith("def ulp(")
    target.wait_for(state="visible")
    page.wait_for_function("document.querySelector(':target').getBoundingClientRect().top < innerHeight")
    assert page.evaluate("document.querySelector(':target').getBoundingClientRect().top") >= 0
    assert wrong == []
    page.context.close()


@browser
def test_an_answer_unfolds_and_a_word_is_found(chromium, site):
    page, asked, wrong = watched(chromium.new_context(offline=True))
    page.goto((site / "01_number_formats.html").as_uri())
    answer = page.locator("details").first
    output = answer.locator("pre").first
    assert not output.is_visible()
    answer.locator("summary").click()
    assert output.is_visible() and output.text_content().strip()
    page.fill("input[name=q]", "subnormal")
    page.press("input[name=q]", "Enter")
    page.wait_for_selector("#search-results li a")
    assert "Number formats" in page.text_content("#search-results")
    assert wrong == [] and {urlsplit(url).scheme for url in asked} <= {"file", "data"}
    page.context.close()
