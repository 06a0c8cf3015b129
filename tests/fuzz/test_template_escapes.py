"""Templates that try to leave the sandbox: refused, or they see nothing of the server."""

from __future__ import annotations

import pytest

from tidewheel.server.chat.templates import ChatTemplate
from tidewheel.server.errors import ApiError

ATTEMPTS = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ self.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.environ }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__.values() }}",
    "{{ raise_exception.__code__.co_filename }}",
    "{{ messages.__class__ }}",
    "{{ messages | attr('__class__') }}",
    "{{ messages | map(attribute='__class__') | list }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "{{ '{a.__class__.__mro__}'.format_map({'a': 1}) }}",
    "{{ ('%s' | format(messages.append)) }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'system'}) }}",
    "{{ (messages | list).clear() }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.environ }}",
    "{% from 'os' import environ %}{{ environ }}",
    "{% extends '/etc/passwd' %}",
    "{{ range(10**12) | list }}",
    "{% for x in range(100001) %}{% endfor %}",
    "{{ undefined.nothing.at.all }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
]
TRACES = ("<class", "__", "0x", "/home", "/usr", "/tidewheel", "root:", "environ")


@pytest.mark.parametrize("source", ATTEMPTS)
def test_nothing_gets_out(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEWHEEL_API_KEY", "a secret of the server")
    messages = [{"role": "user", "content": "hi"}]
    try:
        text = ChatTemplate(source, {}).render(messages)
    except ApiError as error:
        text = error.message
    except RecursionError:
        return  # `as_api_error` answers it as a body that is nested too deeply
    assert "a secret" not in text
    assert "chat template" in text or not any(trace in text for trace in TRACES), text
    assert messages == [{"role": "user", "content": "hi"}]
