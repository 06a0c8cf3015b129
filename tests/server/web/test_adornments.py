"""Colours of code, and formulas, in answers: from our own files, within the page's policy, whatever a model writes."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect
from samples import swept
from server.conftest import RunningServer, StartServer
from server.waiting import eventually
from server.web.conftest import OpenPage, last_answer, send, until_idle

COLOURED = """() => Object.fromEntries([...CSS.highlights].map(([name, ranges]) => [
  name, [...ranges].map((one) => one.startContainer.data.slice(one.startOffset, one.endOffset)),
]))"""


def said(page: Page, text: str) -> None:
    send(page, f"SAY({text})YAS")
    until_idle(page)


def test_code_is_coloured_and_stays_text(server: RunningServer, open_page: OpenPage) -> None:
    page = open_page(server.url)
    said(page, '```py\ndef f(x):  # note\n    return "<b>" + str(7)\n```\n\n- item\n  ```JS\n  let y = null;\n  ```')
    eventually(lambda: page.evaluate("CSS.highlights.get('code-keyword')?.size >= 4"), "no colours")
    coloured = page.evaluate(COLOURED)
    assert {"def", "return", "let", "null"} <= set(coloured["code-keyword"])
    assert coloured["code-comment"] == ["# note"]
    assert coloured["code-string"] == ['"<b>"']
    assert coloured["code-number"] == ["7"]
    assert last_answer(page).locator("pre code > *").count() == 0
    page.get_by_role("button", name="New conversation").click()
    assert all(ranges == [] for ranges in page.evaluate(COLOURED).values())


@pytest.mark.sweep
def test_code_gets_its_colours_while_it_grows(start_server: StartServer, open_page: OpenPage) -> None:
    page = open_page(start_server(engine={"step_s": 0.01}).url)
    page.get_by_label("System prompt").evaluate(
        "(field) => field.value = 'SAY(```py\\nimport x\\n' + 'y\\n'.repeat(2000) + '```)YAS'"
    )
    send(page, "go")
    eventually(lambda: page.evaluate("CSS.highlights.get('code-keyword')?.size"), "no colours")
    assert page.locator("body.busy").count() == 1
    assert page.evaluate(COLOURED)["code-keyword"] == ["import"]
    page.keyboard.press("Escape")
    until_idle(page)


@pytest.mark.sweep
def test_code_of_unknown_languages_stays_plain(server: RunningServer, open_page: OpenPage) -> None:
    page = open_page(server.url)
    said(
        page,
        "```klingon\nreturn 1\n```\n\n```__proto__\nreturn 1\n```\n\n```constructor\nreturn 1\n```\n\n```py\n1\n```",
    )
    eventually(lambda: page.evaluate("CSS.highlights.size"), "no colours")
    assert page.evaluate(COLOURED) == {"code-number": ["1"]}


FORMULAS = r"""Inline \(a_1 < b\) and $x^2$ and $$y$$ for $5 or $6, not \$7.

$$
\sum_{i=1}^{n} i
- \frac{n}{2}
$$

\[
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
\]

- in a list:
  \[ z \]

Broken \(\frac{1}\) stays."""


def test_formulas_are_set(server: RunningServer, open_page: OpenPage) -> None:
    page = open_page(server.url)
    said(page, FORMULAS)
    answer = last_answer(page)
    expect(answer.locator(".formula")).to_have_count(6)
    expect(answer.locator(".formula.display")).to_have_count(4)
    expect(answer.locator("code.math")).to_have_text([r"\(\frac{1}\)"])
    expect(answer.locator("p").first).to_contain_text("for $5 or $6, not $7.")
    assert answer.locator("math").count() == 6  # what a screen reader reads
    family = "(node) => getComputedStyle(node).fontFamily"
    assert "KaTeX_Main" in answer.locator(".katex-html").first.evaluate(family)
    loaded = "[...document.fonts].filter((font) => font.status === 'loaded').length"
    eventually(lambda: page.evaluate(loaded), "no fonts")
    assert page.evaluate("[...document.fonts].every((font) => font.status !== 'error')")


ATTACKS = [
    r"\href{javascript:window.pwned=1}{x}",
    r"\url{javascript:window.pwned=1}",
    r"\includegraphics{https://a.b/c.png}",
    r"\htmlClass{app}{x}",
    r"\htmlStyle{position:fixed;inset:0}{x}",
    r"\htmlData{x=y}{x}",
    r"\text{<img src=x onerror=window.pwned=1>}",
    r"\def\a{\a\a}\a",
    "{" * 1900,
    r"\frac{1}{" * 200 + "}" * 200,
    r"\rule{100000em}{100000em}",
    r"\kern-50000em x \raisebox{9999em}{x}",
    r"\color{red;background:url(//a.b)}x",
]


SET = """async (attacks) => {
  const { formula, setFormulas } = await import("/web/math.js");
  const root = document.querySelector("#turns").appendChild(document.createElement("div"));
  root.className = "markdown";
  for (const attack of attacks) root.append(formula(`$$${attack}$$`));
  await setFormulas(root);
}"""


def test_what_a_formula_asks_for_is_refused_or_bounded(server: RunningServer, open_page: OpenPage) -> None:
    page = open_page(server.url, viewport={"width": 1400, "height": 900})
    page.evaluate(SET, [*ATTACKS, "done"])
    drawn = page.locator("#turns")
    expect(drawn.locator(".formula").last).to_contain_text("done")
    expect(drawn.locator(".math").first).to_have_text(r"$$\def\a{\a\a}\a$$")
    assert page.evaluate("window.pwned") is None
    assert drawn.locator("a, img, script, iframe, .app, [onerror], [data-x]").count() == 0
    assert page.evaluate("scroller.scrollHeight") < 60_000
    assert page.evaluate("document.scrollingElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("language", ["python", swept("xml"), swept("markdown")])
def test_no_code_takes_long_to_colour(server: RunningServer, open_page: OpenPage, language: str) -> None:
    page = open_page(server.url)
    # What takes quadratic time here takes minutes, and the test's time-out ends it.
    attacks = ["(" * 20_000, "<a " * 9_000, '"\\' * 14_000, "/*" * 14_000, "a." * 14_000, "*_" * 14_000, "${" * 14_000]
    page.evaluate(
        """async ([language, attacks]) => {
          const { colour } = await import("/web/highlight.js");
          for (const attack of attacks) {
            const code = document.body.appendChild(document.createElement("pre")).appendChild(new Text(attack));
            await colour(code, language);
            code.parentNode.remove();
          }
        }""",
        [language, attacks],
    )
