"""A chat template cannot make a value that is too large, in any way."""

from __future__ import annotations

from typing import Any

import pytest

from tidewheel.server.chat.templates import ChatTemplate
from tidewheel.server.errors import ApiError

TEXT = "{% set a = 'a' * 999 %}"
LONG = "{% set a = 'a' * 16777216 %}"


def render(source: str, **variables: Any) -> str:
    messages = [{"role": "user", "content": "hello"}]
    return ChatTemplate(source, {}).render(messages, variables=variables)


def again(step: str, times: int = 60) -> str:
    """A step that each time doubles `a`."""
    return step * times + "{{ a }}"


@pytest.mark.parametrize(
    "source",
    [
        TEXT + again("{% set a = a ~ a %}"),
        TEXT + again("{% set a = a + a %}"),
        TEXT + again("{% set a %}{{ a }}{{ a }}{% endset %}"),
        TEXT + again("{% set a %}{% filter upper %}{{ a }}{{ a }}{% endfilter %}{% endset %}"),
        "{% set a = [1] %}" + again("{% set a = [a, a] %}"),
        "{% set a = [1] %}" + again("{% set a = a + a %}"),
        "{% set a = (1, 2) %}" + "{% set a = (a, a) %}" * 60 + "{{ a == a[:] }}",
        "{% set a = {} %}" + "{% set a = {'a': a, 'b': a} %}" * 60 + "{{ a | tojson }}",
        "{% set a = {} %}" + again("{% set a = {'a': a.items(), 'b': a.items()} %}"),
        "{% set a = {} %}" + again("{% set a = dict(a=a, b=a) %}"),
        "{% set a = 99999999999 %}" + again("{% set a = a * a %}"),
        LONG + "".join(f"{{% set a{i} = a[{i}:] %}}" for i in range(99)),
        LONG + "".join(f"{{% set a{i} = a | upper %}}" for i in range(99)),
        "{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ [1] * 9999999999 }}",
        "{{ '%99999999999d' % 1 }}",
        "{{ '%9999999d%9999999d%9999999d%9999999d' % (1, 1, 1, 1) }}",
        "{{ '%*d' % (999999999, 1) }}",
        "{{ '%999999999d' | format(1) }}",
        "{{ ('%(a)s' * 99999) % {'a': 'a' * 99999} }}",
        "{{ '{:>99999999999}'.format(1) }}",
        "{{ '{:>{}}'.format(1, 9999999999) }}",
        "{{ ('{0}' * 99999).format('a' * 99999) }}",
        "{{ 'a'.center(9999999999) }}",
        "{{ 'a' | center(9999999999) }}",
        "{{ 'a'.encode().ljust(9999999999) }}",
        "{{ (1).to_bytes(9999999999, 'big') }}",
        "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
        "{{ ('a' * 99999) | replace('a', 'b' * 99999) }}",
        "{{ ('a' * 99999).translate({97: 'b' * 99999}) }}",
        "{{ ('b' * 99999).join('a' * 99999) }}",
        "{{ ('a' * 99999) | join('b' * 99999) }}",
        "{{ ('\n' * 99999) | indent(99999) }}",
        "{{ range(99999) | list | tojson(indent=99999) }}",
        "{{ [1] | batch(9999999999, 'a') | list }}",
        "{{ [1] | slice(9999999999, 'a') | list }}",
        "{{ ([[1]] * 99999) | sum(start=[]) }}",
        "{{ 1 | round(999999999, 'ceil') }}",
        "{{ {}.fromkeys(range(99999), 'a' * 99999) }}",
        LONG + "{{ a.rfind('ab' + 'a' * 8000000) }}",  # which would take hours
    ],
)
def test_a_value_that_would_be_too_large_is_not_made(source: str) -> None:
    with pytest.raises(ApiError, match="it makes values of more than 33554432 characters, or many large ones") as error:
        render(source)
    assert error.value.status == 400


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        # What was made and is used no more does not count.
        ("{% for i in range(400) %}{% set b = (a ~ i) | upper %}{% endfor %}{{ b is undefined }}", "True"),
        ("{% set ns = namespace(a='') %}{% for i in range(2000) %}{% set ns.a = ns.a ~ 'a' * 999 %}{% endfor %}"
         "{{ ns.a | length }}", "1998000"),
        # Names within names say nothing of what is in them.
        ("{% set n = namespace() %}{% set n.n = n %}{{ n }}", "<Namespace>"),
        ("{{ '%5d|%-3s' % (1, 'a') }}{{ '{:>4}'.format(2) }}{{ '%s' | format('b') }}", "    1|a     2b"),
        ("{{ (1, 2)[::-1] }}{{ [messages[0].role] + ['b'] }}{{ 2 ** 10 }}{{ 7 % 4 }}", "(2, 1)['user', 'b']10243"),
    ],
)  # fmt: skip
def test_what_templates_do_with_large_values_works(source: str, expected: str) -> None:
    assert render(source, a="a" * 2_000_000) == expected
