# ruff: noqa: E501 - a pattern or a list reads best on one line
"""The tool library: signatures with varied names, the requests that need them, and what they return."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .phrases import NoSuchPhraseError, ask, draw_in_split
from .words import CITIES, NAMES, WORDS, made_up_name, made_up_word

Json = dict[str, Any]

_LANGUAGES = (
    "French German Spanish Italian Dutch Polish Greek Latin Chinese Japanese Korean Hindi Turkish Finnish".split()
)
_CURRENCIES = "EUR USD GBP JPY CHF CAD AUD SEK NOK INR CNY".split()
_ROOMS = "kitchen,bedroom,bathroom,hall,living room,office,garage,garden,attic,cellar,studio,library,dining room".split(
    ","
)
_DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday today tomorrow".split()
_SKIES = "sunny cloudy rainy windy foggy snowy stormy clear".split()


def name_value(rng: random.Random, split: str) -> str:
    """Return a person's name of ``split``, listed or made up."""
    return draw_in_split(lambda: rng.choice(NAMES) if rng.random() < 0.5 else made_up_name(rng), split)


def city_value(rng: random.Random, split: str) -> str:
    """Return a place name of ``split``, listed or made up."""
    return draw_in_split(lambda: rng.choice(CITIES) if rng.random() < 0.55 else made_up_name(rng), split)


def topic_value(rng: random.Random, split: str) -> str:
    """Return one to three lower-case words of ``split``."""

    def make() -> str:
        count = rng.choice((1, 2, 2, 3))
        return " ".join(rng.choice(WORDS) if rng.random() < 0.8 else made_up_word(rng) for _ in range(count))

    return draw_in_split(make, split)


def number_value(rng: random.Random, split: str) -> str:
    """Return a number below 1000 of ``split``."""
    return draw_in_split(lambda: str(rng.choice((rng.randrange(1, 100), rng.randrange(1, 1000)))), split)


def _clock(rng: random.Random, split: str) -> str:
    return draw_in_split(
        lambda: rng.choice(
            (f"{rng.randrange(24)}:{rng.randrange(12) * 5:02d}", f"{rng.randrange(1, 13)} {rng.choice(('am', 'pm'))}")
        ),
        split,
    )


def _file(rng: random.Random, split: str) -> str:
    def make() -> str:
        folder = rng.choice(("", "", "data/", "/tmp/", "docs/", "src/"))
        return folder + rng.choice(WORDS) + "." + rng.choice(("txt", "py", "md", "json", "csv", "log"))

    return draw_in_split(make, split)


def _ticker(rng: random.Random, split: str) -> str:
    letters = "ABCDEFGHIKLMNOPRSTUVWXY"
    return draw_in_split(lambda: "".join(rng.choice(letters) for _ in range(rng.choice((3, 4)))), split)


def _choice(values: list[str]) -> Callable[[random.Random, str], str]:
    return lambda rng, split: rng.choice(values)


_VALUES: dict[str, Callable[[random.Random, str], str]] = {
    "city": city_value,
    "city2": city_value,
    "name": name_value,
    "topic": topic_value,
    "n": number_value,
    "m": number_value,
    "clock": _clock,
    "file": _file,
    "ticker": _ticker,
    "language": _choice(_LANGUAGES),
    "cur": _choice(_CURRENCIES),
    "cur2": _choice(_CURRENCIES),
    "room": _choice(_ROOMS),
    "day": _choice(_DAYS),
    "state": _choice(["on", "off"]),
    "unit": _choice(["celsius", "fahrenheit"]),
}


@dataclass(frozen=True)
class Parameter:
    """One argument: the names it may carry, its JSON type and the slot that supplies its value."""

    names: tuple[str, ...]
    slot: str
    type: str = "string"
    about: str = ""


@dataclass(frozen=True)
class Tool:
    """A tool family: interchangeable names and descriptions, its parameters, requests and results."""

    names: tuple[str, ...]
    about: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    requests: tuple[str, ...]
    optional: tuple[Parameter, ...] = ()
    results: tuple[tuple[str, str], ...] = field(default=())


def _p(names: str, slot: str, kind: str = "string") -> Parameter:
    return Parameter(tuple(names.split("|")), slot, kind)


TOOLS: tuple[Tool, ...] = (
    Tool(
        ("get_weather", "weather", "get_current_weather", "current_weather", "fetch_weather", "weather_lookup"),
        (
            "Get the weather",
            "Get the current weather in a given location",
            "Current weather of a city",
            "Weather for a place",
        ),
        (_p("city|location|place|city|location", "city"),),
        (
            "{what is|what's|how is|tell me|show me|check} the {current|} {weather|weather|forecast|temperature} "
            "{like|} {in|for} [city] {today|now|right now|}",
            "{is it|will it be|is it going to be} {raining|cold|warm|sunny|hot|windy|rainy} in [city] {today|now|}",
            "{how|what} {cold|warm|hot} is it in [city] {today|now|}",
            "do I need {an umbrella|a coat|a jacket} in [city] {today|now|}",
            "what's the weather in [city] {right now|today|}",
            "weather in [city]",
            "I {want|need|would like} to know the weather in [city]",
        ),
        (_p("unit|units", "unit"),),
        (
            ('{"temperature": [d], "condition": "[sky]"}', "It is [d] degrees and [sky] in [city]."),
            ('{"temp": [d], "sky": "[sky]"}', "It is [d] degrees and [sky] in [city]."),
            ('{"city": "[city]", "temperature": [d], "condition": "[sky]"}', "It is [d] degrees and [sky] in [city]."),
            ('{"temperature": [d]}', "It is [d] degrees in [city]."),
        ),
    ),
    Tool(
        ("get_time", "current_time", "get_current_time", "time_in", "clock"),
        ("Get the time in a city", "Current time of a place", "Get the local time", "Tell the time"),
        (_p("city|location|place|timezone", "city"),),
        (
            "{what time is it|what is the time|what's the time|what is the local time} in [city] {now|right now|}",
            "{tell me|show me|give me|check} the {current|local|} time in [city]",
            "how late is it in [city] {now|}",
            "time in [city]",
        ),
        (),
        (('{"time": "[clock]"}', "It is [clock] in [city]."),),
    ),
    Tool(
        ("add", "add_numbers", "sum", "plus", "calculate_sum"),
        ("Add two numbers", "Add two integers", "Return the sum of two numbers", "Sum of a and b"),
        (_p("a|x|first", "n", "integer"), _p("b|y|second", "m", "integer")),
        (
            "{what is|calculate|compute|work out} [n] {plus|+|and} [m]",
            "{add|sum|sum up|add up} [n] {and|to|with} [m]",
            "{what is|calculate|compute|give me} the sum of [n] and [m]",
        ),
    ),
    Tool(
        ("multiply", "times", "product", "multiply_numbers"),
        ("Multiply two numbers", "Multiply two integers", "Return the product of two numbers"),
        (_p("a|x|first", "n", "integer"), _p("b|y|second", "m", "integer")),
        (
            "{what is|calculate|compute|work out} [n] {times|*|multiplied by|x} [m]",
            "multiply [n] {and|by|with} [m]",
            "{what is|calculate|compute|give me} the product of [n] and [m]",
        ),
    ),
    Tool(
        ("search", "web_search", "search_web", "find", "lookup"),
        ("Search the web", "Search for a query", "Find pages on the internet", "Web search"),
        (_p("query|q|text|search_term", "topic"),),
        (
            "{search|search the web|google|look|search online} for [topic]",
            "{look up|find|research} [topic] {online|on the web|on the internet|}",
            "{find|get|show} me {something|pages|information|results|articles} {about|on} [topic]",
            "what does the web say about [topic]",
        ),
    ),
    Tool(
        ("send_email", "email", "send_mail", "send_message", "mail"),
        ("Send an email", "Send a message to a person", "Send an e-mail to someone", "Mail a person"),
        (_p("to|recipient|receiver", "name"), _p("subject|text|message|body", "topic")),
        (
            "{send|write} {an email|a mail|a message|an e-mail} to [name] about [topic]",
            "{email|mail|message} [name] about [topic]",
            "{tell|inform} [name] about [topic] {by email|in an email|by mail}",
        ),
        (),
        (('{"status": "sent"}', "I sent the message to [name]."), ('{"ok": true}', "I sent the message to [name].")),
    ),
    Tool(
        ("set_reminder", "create_reminder", "remind", "add_reminder"),
        ("Set a reminder", "Create a reminder", "Remind the user at a time"),
        (_p("text|task|what", "topic"), _p("time|at|when", "clock")),
        (
            "{remind me|set a reminder|make a reminder|create a reminder} {about|for} [topic] at [clock]",
            "at [clock] remind me {about|of} [topic]",
        ),
        (),
        (('{"status": "ok"}', "I will remind you at [clock]."),),
    ),
    Tool(
        ("set_timer", "start_timer", "timer"),
        ("Set a timer", "Start a timer in minutes", "Start a countdown"),
        (_p("minutes|duration|time", "n", "integer"),),
        (
            "{set|start|make|create|begin} a {timer|countdown} {for|of} [n] minutes",
            "{start|set} a [n] minute {timer|countdown}",
            "{wake|call|tell} me in [n] minutes",
        ),
        (),
        (('{"status": "ok"}', "The timer is set for [n] minutes."),),
    ),
    Tool(
        ("set_alarm", "alarm", "create_alarm"),
        ("Set an alarm", "Set the alarm clock", "Create an alarm at a time"),
        (_p("time|at|clock", "clock"),),
        (
            "{set|create|make} an alarm {for|at} [clock] {tomorrow|}",
            "{wake me up|wake me|get me up} at [clock] {tomorrow|}",
            "I {must|need to|have to|want to} get up at [clock]",
        ),
        (),
        (('{"status": "ok"}', "The alarm is set for [clock]."),),
    ),
    Tool(
        ("translate", "translate_text", "translation"),
        ("Translate text", "Translate a text into a language", "Translate words"),
        (_p("text|words|phrase", "topic"), _p("language|target|to", "language")),
        (
            '{translate|put|turn} "[topic]" {to|into} [language]',
            '{what is|how do you say|how do I say} "[topic]" in [language]',
            'I need "[topic]" in [language]',
        ),
    ),
    Tool(
        ("convert_currency", "currency", "exchange", "convert_money"),
        ("Convert money", "Convert between currencies", "Currency converter"),
        (
            _p("amount|value", "n", "number"),
            _p("from|source|from_currency", "cur"),
            _p("to|target|to_currency", "cur2"),
        ),
        (
            "{convert|change|exchange} [n] [cur] {to|into} [cur2]",
            "{how much|what} is [n] [cur] in [cur2]",
            "how {much|many} [cur2] {is|are|do I get for} [n] [cur] {today|now|}",
        ),
    ),
    Tool(
        ("get_stock_price", "stock_price", "stock", "quote"),
        ("Get a stock price", "Price of a stock", "Current stock price for a ticker"),
        (_p("symbol|ticker|stock", "ticker"),),
        (
            "{what is|what's|show me|get|give me|check} the {stock price|price|share price|stock|current price} of [ticker]",
            "how {is|much is} [ticker] {doing|trading|worth|trading at} {today|now|}",
            "stock price of [ticker]",
        ),
        (),
        (('{"price": [d]}', "The price of [ticker] is [d]."),),
    ),
    Tool(
        ("play_music", "play", "music", "play_song"),
        ("Play music", "Play a song", "Play music of an artist"),
        (_p("artist|song|name|query", "name"),),
        (
            "play {some|a song|music|something|some music} {by|from|of} [name]",
            "{I want to|let me|can I} hear {some music by|a song by|something by|music from} [name]",
            "put on [name]",
        ),
        (),
        (('{"status": "playing"}', "Now playing music by [name]."),),
    ),
    Tool(
        ("book_table", "reserve_table", "book_restaurant", "reserve"),
        ("Book a table", "Reserve a table in a restaurant", "Make a reservation"),
        (_p("restaurant|place|name", "name"), _p("people|guests|persons", "n", "integer")),
        (
            "{book|reserve|get|get me|order} a table for [n] {people|persons|guests|} at [name]",
            "{make|I need|I want} a reservation for [n] {people|persons|guests|} at [name]",
        ),
        (),
        (('{"status": "booked"}', "Your table for [n] at [name] is booked."),),
    ),
    Tool(
        ("find_restaurants", "restaurants", "search_restaurants"),
        ("Find restaurants", "Find places to eat in a city", "Restaurant search"),
        (_p("city|location|place", "city"),),
        (
            "{find|show me|list|search|search for|suggest} {good|nice|some|the best|cheap|} restaurants in [city]",
            "where can I {eat|have dinner|have lunch|get food} in [city] {tonight|today|}",
        ),
    ),
    Tool(
        ("set_light", "switch_light", "light", "control_light"),
        ("Switch a light", "Turn a light on or off", "Control the light of a room"),
        (_p("room|where|location", "room"), _p("state|status|mode", "state")),
        (
            "{turn|switch} [state] the {light|lights|lamp} in the [room]",
            "{turn|switch} the [room] {light|lights|lamp} [state]",
            "[room] {light|lights} [state]",
        ),
        (),
        (('{"status": "ok"}', "The light in the [room] is [state]."),),
    ),
    Tool(
        ("set_temperature", "set_thermostat", "heating", "thermostat"),
        ("Set the temperature of a room", "Set the thermostat", "Control the heating"),
        (_p("room|where|location", "room"), _p("degrees|temperature|value", "n", "integer")),
        (
            "{set|heat|warm|cool} the [room] to [n] degrees",
            "{make it|I want|set it to} [n] degrees in the [room]",
        ),
        (),
        (('{"status": "ok"}', "The [room] is set to [n] degrees."),),
    ),
    Tool(
        ("get_user", "find_user", "user_info", "lookup_user"),
        ("Get a user by id", "Look up a user", "Return data of a user"),
        (_p("id|user_id|number", "n", "integer"),),
        (
            "{get|find|look up|show|show me|fetch|who is} {the user|user} {with id|number|with number|} [n]",
            "{what do we know|tell me} about user [n]",
        ),
        (),
        (('{"name": "[name]"}', "User [n] is [name]."),),
    ),
    Tool(
        ("read_file", "open_file", "cat", "load_file", "show_file"),
        ("Read a file", "Open a file", "Return the content of a file"),
        (_p("path|filename|file", "file"),),
        (
            "{read|open|show|show me|print|load|display} {the file|the content of|} [file]",
            "what {is in|does|is inside} {the file|} [file] {say|contain|}",
        ),
    ),
    Tool(
        ("delete_file", "remove_file", "delete", "rm"),
        ("Delete a file", "Remove a file from disk", "Erase a file"),
        (_p("path|filename|file", "file"),),
        (
            "{delete|remove|erase|throw away|get rid of} {the file|} [file]",
            "I {no longer|do not} need [file], {delete|remove} it",
        ),
        (),
        (('{"status": "deleted"}', "I deleted [file]."),),
    ),
    Tool(
        ("create_event", "add_event", "schedule", "calendar_add"),
        ("Create a calendar event", "Add an event to the calendar", "Schedule an event"),
        (_p("title|name|event", "topic"), _p("day|date|when", "day")),
        (
            "{schedule|plan|create|add} {an event|a meeting|an appointment} {about|called|for} [topic] on [day]",
            "put [topic] {in|into} my calendar {on|for} [day]",
        ),
        (),
        (('{"status": "ok"}', "The event is in your calendar for [day]."),),
    ),
    Tool(
        ("call_contact", "phone", "call", "make_call", "dial"),
        ("Call a person", "Make a phone call", "Phone a contact"),
        (_p("name|contact|person", "name"),),
        (
            "{call|phone|ring|dial} [name] {now|for me|}",
            "{make a call|make a phone call|place a call} to [name]",
            "I {want|need} to {talk|speak} to [name] {on the phone|by phone}",
        ),
        (),
        (('{"status": "calling"}', "I am calling [name]."),),
    ),
    Tool(
        ("get_news", "news", "latest_news", "headlines"),
        ("Get the news", "Latest news on a topic", "Return headlines"),
        (_p("topic|category|subject", "topic"),),
        (
            "{what is|what's|show me|get|tell me|give me} the {latest|newest|recent|} news {about|on} [topic]",
            "{any|is there any|are there any} {news|headlines} {about|on} [topic] {today|}",
        ),
    ),
    Tool(
        ("roll_dice", "dice", "roll", "throw_dice"),
        ("Roll a die", "Roll dice", "Throw a die with some sides"),
        (_p("sides|faces", "n", "integer"),),
        (
            "{roll|throw} a {die|dice} with [n] {sides|faces}",
            "{roll|throw} a [n] sided {die|dice}",
        ),
        (),
        (('{"result": [d]}', "You rolled [d]."),),
    ),
    Tool(
        ("get_distance", "distance", "route", "measure_distance"),
        ("Distance between two cities", "Get the distance between places", "How far two places are apart"),
        (_p("from|origin|start", "city"), _p("to|destination|end", "city2")),
        (
            "how far is it from [city] to [city2]",
            "{what is|give me|tell me|calculate} the distance {from|between} [city] {and|to} [city2]",
            "how {far|long} is the {way|road|trip|drive} from [city] to [city2]",
        ),
        (),
        (('{"km": [d]}', "It is [d] km from [city] to [city2]."),),
    ),
)

_ODD_VERBS = "check run get make count scan update close open start stop order print clean test move sort show list create".split()

_ODD_KEYS = ["name", "id", "size", "color", "title", "count", "level", "key", "label", "code", "user", "speed"]


@dataclass(frozen=True)
class Request:
    """A request for one tool: its signature, the user's words, the call and one result with its spoken answer."""

    signature: Json
    prompt: str
    call: Json
    result: str
    answer: str


def signature(rng: random.Random, tool: Tool, *, optional: bool = False) -> tuple[Json, dict[str, Parameter]]:
    """Write the OpenAI signature of ``tool`` with one choice of names; also map argument names to parameters."""
    chosen: dict[str, Parameter] = {}
    for parameter in (*tool.parameters, *(tool.optional if optional else ())):
        free = [name for name in parameter.names if name not in chosen]
        chosen[rng.choice(free)] = parameter
    properties = {name: {"type": parameter.type} for name, parameter in chosen.items()}
    required = [name for name, parameter in chosen.items() if parameter not in tool.optional]
    function = {
        "name": rng.choice(tool.names),
        "description": rng.choice(tool.about) + rng.choice(("", "", ".")),
        "parameters": {"type": "object", "properties": properties, "required": required},
    }
    return {"type": "function", "function": function}, chosen


def _typed(value: str, kind: str) -> str | int:
    return int(value) if kind in ("integer", "number") else value


def listed_request(rng: random.Random, split: str, tool: Tool) -> Request:
    """Make a request for a tool of the library."""
    with_optional = bool(tool.optional) and rng.random() < 0.4
    spec, chosen = signature(rng, tool, optional=with_optional)
    slots = {slot: make(rng, split) for slot, make in _VALUES.items()}
    slots |= {"d": number_value(rng, split), "sky": rng.choice(_SKIES)}
    patterns = list(tool.requests)
    say_optional = with_optional and rng.random() < 0.4
    if say_optional:
        patterns = [f"{pattern} {{in|using}} [{tool.optional[0].slot}]" for pattern in patterns]
    prompt = ask(rng, patterns, split, slots)
    arguments = {
        name: _typed(slots[parameter.slot], parameter.type)
        for name, parameter in chosen.items()
        if parameter not in tool.optional or say_optional
    }
    call = {"name": spec["function"]["name"], "arguments": arguments}
    if tool.results and rng.random() < 0.75:
        result, answer = rng.choice(tool.results)
    else:
        value = rng.choice((slots["d"], slots["name"] + " " + slots["topic"], slots["topic"]))
        slots["value"] = value
        result = rng.choice(('{"result": "[value]"}', '{"value": "[value]"}', "[value]", '{"output": "[value]"}'))
        answer = "The result is: [value]"
    for slot, value in slots.items():
        result, answer = result.replace(f"[{slot}]", value), answer.replace(f"[{slot}]", value)
    return Request(spec, prompt, call, result, answer)


def odd_request(rng: random.Random, split: str) -> Request:
    """Make a request for an invented tool, so that the signature is read and not remembered."""
    noun = draw_in_split(lambda: rng.choice(WORDS) if rng.random() < 0.7 else made_up_word(rng), split)
    verb = rng.choice(_ODD_VERBS)
    name = rng.choice((f"{verb}_{noun}", f"{noun}_{verb}", f"{verb}_{noun}s"))
    keys = rng.sample(_ODD_KEYS, 2)[: rng.choice((1, 1, 2))]
    arguments: dict[str, str | int] = {}
    for key in keys:
        if key in ("id", "size", "count", "level", "code", "speed"):
            arguments[key] = int(number_value(rng, split))
        else:
            arguments[key] = rng.choice((name_value, topic_value))(rng, split)
    said = " and ".join(f"{key} {value}" for key, value in arguments.items())
    slots = {"tool": name, "said": said, "verb": verb, "noun": noun}
    prompt = ask(
        rng,
        (
            "{call|use|run|invoke|try|execute} {the tool|} [tool] {with|for|using|on} [said]",
            "{I want you to|you should|can you|could you} {call|use|run} [tool] {with|for} [said]",
            "[verb] the [noun] {with|for|using} [said]",
            "[verb] {a|my|our} [noun] {with|for|using} [said]",
        ),
        split,
        slots,
    )
    properties = {key: {"type": "integer" if isinstance(value, int) else "string"} for key, value in arguments.items()}
    function = {
        "name": name,
        "description": rng.choice(
            (f"{verb} the {noun}".capitalize(), f"{verb} a {noun}".capitalize(), f"Tool for {noun}")
        ),
        "parameters": {"type": "object", "properties": properties, "required": list(properties)},
    }
    value = rng.choice((number_value, name_value, topic_value))(rng, split)
    result = rng.choice((json.dumps({"result": value}), value, json.dumps({"value": value})))
    return Request(
        {"type": "function", "function": function},
        prompt,
        {"name": name, "arguments": arguments},
        result,
        f"The result is: {value}",
    )


def request(rng: random.Random, split: str) -> tuple[Request, Tool | None]:
    """Make a request for any tool; the family is returned too, to keep look-alikes out of the distractors."""
    while True:
        if rng.random() < 0.18:
            return odd_request(rng, split), None
        tool = rng.choice(TOOLS) if rng.random() < 0.8 else TOOLS[0]
        try:
            return listed_request(rng, split, tool), tool
        except NoSuchPhraseError:
            continue  # a tool with few wordings may have none in the held-out split
