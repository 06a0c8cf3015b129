"""Markdown as the page draws it: the same nodes however the text is cut, and never anything but text and its marks."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from playwright.sync_api import Page

DRAW = """async (pieces) => {
  const { MarkdownStream } = await import("/web/markdown-stream.js");
  const root = document.createElement("div");
  const announced = [];
  const stream = new MarkdownStream(root, (text) => announced.push(text));
  for (const piece of pieces) stream.append(piece);
  stream.finish();
  const simple = root.cloneNode(true);
  for (const figure of simple.querySelectorAll("figure")) {
    const language = figure.querySelector("figcaption span").textContent;
    const pre = document.createElement("pre");
    if (language !== "text") pre.setAttribute("lang", language);
    pre.append(figure.querySelector("code").textContent);
    figure.replaceWith(pre);
  }
  for (const box of simple.querySelectorAll("div.table")) box.replaceWith(...box.childNodes);
  for (const [name, ...attributes] of [["a", "target", "rel", "title"], ["input", "type", "disabled", "aria-label"],
                                       ["th", "scope"]]) {
    for (const node of simple.querySelectorAll(name)) attributes.forEach((one) => node.removeAttribute(one));
  }
  const tags = [...new Set([...root.querySelectorAll("*")].map((node) => node.localName))];
  const attributes = [...new Set([...root.querySelectorAll("*")].flatMap((node) => node.getAttributeNames()))];
  const links = [...root.querySelectorAll("a")].map((link) => [link.protocol, link.rel, link.target]);
  return { html: root.innerHTML, simple: simple.innerHTML, tags, attributes, links, announced };
}"""

TAGS = set(
    "p h2 h3 h4 h5 h6 ul ol li blockquote hr br strong em del code pre a table thead tbody tr th td div figure"
    " figcaption span button svg use input".split()
)
ATTRIBUTES = set(
    "class href target rel title start type disabled checked aria-label aria-hidden role tabindex scope".split()
)

Draw = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def draw(scripts_page: Page) -> Draw:
    """Draws the Markdown that these pieces add up to."""
    return lambda *pieces: scripts_page.evaluate(DRAW, list(pieces))


CASES = [
    ("plain", "<p>plain</p>"),
    ("one\ntwo\n\nthree", "<p>one<br>two</p><p>three</p>"),
    ("**b** __b__ *i* _i_ ~~d~~ ***both***", "<p><strong>b</strong> <strong>b</strong> <em>i</em> <em>i</em>"
     " <del>d</del> <strong><em>both</em></strong></p>"),
    ("**a *b*** *a **b** c*", "<p><strong>a <em>b</em></strong> <em>a <strong>b</strong> c</em></p>"),
    ("snake_case_name 2 * 3 * 4 a*b*c **", "<p>snake_case_name 2 * 3 * 4 a<em>b</em>c **</p>"),
    ("`a*b*` ``a`b`` ` `", "<p><code>a*b*</code> <code>a`b</code> <code> </code></p>"),
    (r"\*no\* \_no\_ \# \\", "<p>*no* _no_ # \\</p>"),
    ("&lt;b&gt; &amp;amp; &copy;", "<p>&lt;b&gt; &amp;amp; &amp;copy;</p>"),
    (r"\(a_1 * b_1\) and $$x*y*z$$ cost $5 or $6",
     r'<p><code class="math">\(a_1 * b_1\)</code> and <code class="math">$$x*y*z$$</code> cost $5 or $6</p>'),
    ("[x](https://a.b/c_d_e) [**y**](<http://a.b/>)",
     '<p><a href="https://a.b/c_d_e">x</a> <a href="http://a.b/"><strong>y</strong></a></p>'),
    ("https://a.b/c_(d)_e, (see http://a.b/). xhttps://no", '<p><a href="https://a.b/c_(d)_e">https://a.b/c_(d)_e</a>,'
     ' (see <a href="http://a.b/">http://a.b/</a>). xhttps://no</p>'),
    ("<https://a.b/> ![a picture](https://a.b/p.png)",
     '<p><a href="https://a.b/">https://a.b/</a> <a href="https://a.b/p.png">a picture</a></p>'),
    ("[a](javascript:alert(1)) [b](data:text/html,x) [c](/relative)",
     "<p>[a](javascript:alert(1)) [b](data:text/html,x) [c](/relative)</p>"),
    ("<script>alert(1)</script><img src=x onerror=alert(1)>",
     "<p>&lt;script&gt;alert(1)&lt;/script&gt;&lt;img src=x onerror=alert(1)&gt;</p>"),
    ("# One\n### Three ###\n####### Seven", "<h2>One</h2><h4>Three</h4><p>####### Seven</p>"),
    ("a\n# b\nc", "<p>a</p><h2>b</h2><p>c</p>"),
    ("a\n\n---\n***\n- - -", "<p>a</p><hr><hr><hr>"),
    ("> a\n> b\n>\n> - c\n\nd", "<blockquote><p>a<br>b</p><ul><li>c</li></ul></blockquote><p>d</p>"),
    ("- a\n- b\n  - c\n  - d\n- e", "<ul><li>a</li><li>b<ul><li>c</li><li>d</li></ul></li><li>e</li></ul>"),
    ("1. a\n2. b\n\n   more\n3. c", "<ol><li>a</li><li><p>b</p><p>more</p></li><li>c</li></ol>"),
    ("3) a\n4) b", '<ol start="3"><li>a</li><li>b</li></ol>'),
    ("Steps:\n1. a\n   ```sh\n   ls\n\n   ls\n   ```\n2. b",
     '<p>Steps:</p><ol><li>a<pre lang="sh">ls\n\nls</pre></li><li>b</li></ol>'),
    ("In\n1984. It was", "<p>In<br>1984. It was</p>"),
    ("- [x] done\n- [ ] not", '<ul><li class="task"><input checked="">done</li><li class="task"><input>not</li></ul>'),
    ("- a\n\nb", "<ul><li>a</li></ul><p>b</p>"),
    ("```python\nx = 1\n\n# no heading\n```\nafter", '<pre lang="python">x = 1\n\n# no heading</pre><p>after</p>'),
    ("~~~\n```\n~~~", "<pre>```</pre>"),
    ("````md\n```\na\n```\n````", '<pre lang="md">```\na\n```</pre>'),
    ("```\nopen **end", "<pre>open **end</pre>"),
    ("a\r\nb\r\n\r\n```\r\nc\r\n```\r\n", "<p>a<br>b</p><pre>c</pre>"),
    ("| a | b |\n|:--|--:|\n| 1 | `x|y` |\n| 2 \\| 3 |\n\nend",
     '<table><thead><tr><th>a</th><th class="end">b</th></tr></thead><tbody><tr><td>1</td><td class="end">'
     '<code>x|y</code></td></tr><tr><td>2 | 3</td><td class="end"></td></tr></tbody></table><p>end</p>'),
    ("a | b\nno table", "<p>a | b<br>no table</p>"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_marks_become_nodes_at_every_cut(draw: Draw, text: str, expected: str) -> None:
    assert draw(text)["simple"] == expected
    assert draw(*text)["simple"] == expected


fragments = st.sampled_from(
    [
        *"\n\n\n  *_`~[]()<>!#|-+:\\.1a$&", "\r\n", "\n\n", "\n  ", "\n- ", "\n1. ", "\n> ", "\n# ",
        "```", "\n```", "\n```py\n", "**", "~~", "](", "https://a.b/c", "javascript:x", "<img src=x onerror=y>",
        "| a | b |\n|--|--|\n", "\n---\n",
        "[x](https://a.b)", "word ", "&lt;", "\\(", "\\)", "$$", "- [ ] ", "é🌊",
    ]
)  # fmt: skip
texts = st.one_of(st.lists(fragments, max_size=40).map("".join), st.text(max_size=60))


@settings(deadline=None, max_examples=40)
@given(texts, st.data())
def test_any_text_is_drawn_alike_in_any_pieces_and_holds_nothing_but_known_nodes(
    draw: Draw, text: str, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    whole = draw(text)
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert draw(*pieces)["html"] == whole["html"]
    assert set(whole["tags"]) <= TAGS
    assert set(whole["attributes"]) <= ATTRIBUTES
    for protocol, rel, target in whole["links"]:
        assert protocol in ("http:", "https:")
        assert (rel, target) == ("noopener noreferrer nofollow", "_blank")


@pytest.mark.parametrize(
    "text",
    [
        "[" * 50_000, "*a " * 30_000, "_a " * 30_000, "**" * 40_000, "`" * 50_000, "` `` " * 20_000, "[a](" * 20_000,
        "[a](" + " " * 50_000, "![" * 30_000, "> " * 20_000, "- " * 20_000, "\n" * 50_000,
        "- a\n" + "\n" * 50_000 + "b", "# " + " #" * 30_000, "|" * 50_000 + "\n" + "|-" * 50_000, "a|" * 20_000,
        "```" + " " * 50_000 + "`",
        "\\(" * 40_000, "<http://" * 10_000, "https://a.b/" + ")" * 50_000, "https://a.b/" + "." * 50_000 + "x",
        "-" + " -" * 30_000 + "x", "$$" * 30_001, "  " * 9_000 + "- a",
        "*" + "a" * 50_000, "[" + "[a]" * 20_000, '[a](b "' * 10_000, "&lt" * 30_000, "~~~" + "~" * 50_000,
    ],
    ids=lambda text: f"{text[:6]!r}",
)  # fmt: skip
def test_no_text_takes_long(draw: Draw, text: str) -> None:
    # What takes quadratic time here takes minutes, and the test's time-out ends it.
    assert re.search(r"\bend</(p|pre)>$", draw(text, "\n\nend")["simple"])


def test_what_is_complete_is_left_alone_while_more_comes(draw: Draw) -> None:
    assert draw("# A\n\nb\n\n```\nc\n```\n", "- d")["announced"] == ["A", "b", "textc", "d"]


KEPT = """async () => {
  const { MarkdownStream } = await import("/web/markdown-stream.js");
  const root = document.createElement("div");
  const stream = new MarkdownStream(root);
  stream.append("first\\n\\n```py\\nx = 1\\n");
  const [paragraph, figure] = root.children;
  const code = figure.querySelector("code").firstChild;
  stream.append("y =");
  const before = code.data;
  stream.append(" 2\\n``");
  stream.append("`\\nlast");
  stream.finish();
  return [root.children[0] === paragraph, root.children[1] === figure,
          figure.querySelector("code").firstChild === code, before, code.data, root.lastChild.textContent];
}"""


def test_open_code_grows_in_place(scripts_page: Page) -> None:
    assert scripts_page.evaluate(KEPT) == [True, True, True, "x = 1\ny =", "x = 1\ny = 2", "last"]


def test_links_of_the_expected_kind_only(draw: Draw) -> None:
    urls = re.findall(r'href="([^"]+)"', draw("http://a.b [x](HTTPS://C.D/é) [y](ftp://e.f) www.g.h")["html"])
    web = [url for url in urls if not url.startswith("#")]
    assert [urlsplit(url).netloc for url in web] == ["a.b", "c.d"]
