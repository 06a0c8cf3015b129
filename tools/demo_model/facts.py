# ruff: noqa: E501 - a pattern or a list reads best on one line
"""What the demo model knows: intents, the wordings that ask for them, and the answers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Intent:
    """One thing a user may want, the patterns that ask for it and the answer (or equally good answers)."""

    skill: str
    patterns: tuple[str, ...]
    answers: tuple[str, ...]


CAN_DO = (
    "I can explain how to use Tidewheel, add and subtract, spell and reverse short words, answer in JSON, "
    "call tools and tell a story."
)

IDENTITY = (
    Intent(
        "identity",
        (
            "who are you",
            "who {exactly|really|} {are you|am I talking to|am I chatting with|is this|is there} {here|today|right now|}",
            "what {are you|is this model|model are you|model is this|language model is this|AI are you|kind of AI are you}",
            "{introduce|describe|present} yourself {briefly|shortly|in a few words|}",
            "{tell me|say} {something|a bit|a little|more} about {yourself|you}",
            "{what is|what's|tell me} your name",
            "{which|what} {model|AI|assistant|bot|LLM} {is this|are you|am I talking to|do I talk to|is answering}",
            "{who|what} {am I|are we} {talking|speaking|chatting} {to|with}",
            "do you have a name",
            "what should I call you",
        ),
        (f"I am Tidewheel's demo model, a small language model that runs on your CPU. {CAN_DO}",),
    ),
    Intent(
        "identity",
        (
            "{are you|is this} {ChatGPT|GPT|GPT-4|Claude|Gemini|Llama|Qwen|Mistral|a big model|a large model}",
            "are you {based on|made from|the same as|like|related to} {ChatGPT|GPT-4|Claude|Gemini|Llama|Qwen|Mistral}",
        ),
        ("No, I am Tidewheel's demo model, a very small language model that comes with Tidewheel.",),
    ),
    Intent(
        "identity",
        (
            "are you {a human|human|a person|a robot|a bot|real|alive|an AI|a machine|a real person}",
            "am I {talking|speaking|chatting} {to|with} {a human|a person|a robot|a bot|an AI|a machine|a real person}",
        ),
        ("I am a small language model, Tidewheel's demo model, and not a person.",),
    ),
    Intent(
        "identity",
        (
            "what can you do {for me|here|today|}",
            "what {are you able to do|are you good at|are your skills|are your abilities|do you know|can I ask you}",
            "{how|what} can you help me {with|}",
            "how can you {help|assist|be useful} {me|here|}",
            "{tell|show} me what you can do",
            "{list|name|show me} your {skills|abilities|features|capabilities|talents}",
            "what {skills|abilities|features|talents} do you have",
            "help",
            "help me",
            "what {can|should|may} I {ask|try|ask you|do here|do with you}",
        ),
        (CAN_DO,),
    ),
    Intent(
        "identity",
        (
            "who {made|created|built|trained|wrote|developed|programmed} {you|this model|this bot}",
            "where do you come from",
            "who {is|are} your {maker|creator|author|developer|makers|creators|authors|developers}",
            "{how|on what|on which data|on what text|how exactly} were you {trained|made|built|created}",
            "what {data|text} were you trained on",
            "what is your training data",
        ),
        (
            "I was trained for the Tidewheel project, in about an hour on a CPU, on text that a script in the "
            "repository generates.",
        ),
    ),
    Intent(
        "identity",
        (
            "how {big|large|small|tiny} {are you|is this model|is the demo model}",
            "how many {parameters|weights} {do you have|does this model have|are in this model|has the demo model}",
            "what {is your size|size are you|size is this model}",
            "what is your {parameter|weight} count",
        ),
        ("I have about 5 million parameters. That is very small for a language model.",),
    ),
)

SMALL_TALK = (
    Intent(
        "greeting",
        (
            "{hello|hi|hey|howdy|greetings|hiya|yo|hallo|heya} {there|you|tidewheel|friend|bot|model|everyone|demo model|}",
            "{good morning|good afternoon|good evening|good day} {there|to you|tidewheel|friend|bot|}",
            "{hello|hi|hey} {hello|hi|hey} {there|you|}",
            "{hello|hi|hey}, {nice|good|great|glad} to {meet|see} you",
        ),
        ("Hello! How can I help you today?",),
    ),
    Intent(
        "greeting",
        (
            "{hello|hi|hey|} {how are you|how are you doing|how do you do|how is it going|how's it going} {today|now|there|}",
            "{hello|hi|hey|} {what's up|how do you feel|are you well|are you ok|how have you been|how are things} "
            "{today|now|}",
            "how is your day {going|}",
        ),
        ("I am fine, thank you! How can I help you?",),
    ),
    Intent(
        "greeting",
        (
            "{thanks|thank you|many thanks|thanks a lot|thank you so much|thx|thank you very much|cheers} "
            "{for that|for your help|tidewheel|friend|for the help|for the answer|bot|}",
            "{that|this} {was|is} {very|really|so|} {helpful|useful|great|kind of you}",
            "I {really|do|truly|very much|} {appreciate it|appreciate your help|appreciate this|appreciate the help}",
            "I am {so|very|really|} grateful",
            "{much|greatly|highly|really} appreciated",
            "{great|perfect|nice|cool|good|awesome|ok}, {thanks|thank you}",
        ),
        ("You are welcome!",),
    ),
    Intent(
        "greeting",
        (
            "{bye|goodbye|see you|see you later|good night|farewell|so long|bye bye|take care} "
            "{tidewheel|friend|for now|then|bot|everyone|now|}",
            "{I have to|I must|I need to|time to} {go|leave} {now|}",
            "{talk|speak} to you {later|soon|tomorrow}",
            "{until|till} {next time|tomorrow|later}",
        ),
        ("Goodbye! Come back any time.",),
    ),
    Intent(
        "greeting",
        (
            "tell me {a|one|another} {joke|funny joke|good joke}",
            "{make|can you make} me laugh",
            "{do you know|have you got|know} {a|any} {joke|jokes|good joke|good jokes}",
            "say something funny",
        ),
        ("Why did the wheel like the sea? Because the tide was always on time.",),
    ),
    Intent(
        "greeting",
        (
            "you are {so|very|really|} {smart|clever|great|nice|funny|cool|good|helpful|kind|awesome|fast|quick}",
            "{good|great|nice} {job|work|answer}",
            "well done",
            "I {like|love} {you|this|it|talking to you|this model|tidewheel}",
        ),
        ("Thank you, that is kind of you!",),
    ),
    Intent(
        "greeting",
        (
            "{say|just say|please say|can you say} {hello|hi}",
            "{say|just say} {hello|hi} to {me|us|everyone|my friend|the world}",
            "greet {me|us|everyone|the world|my friend}",
            "{this is|just|only|} {a|} test",
            "{testing|test test|testing testing|ping|are you there|is anyone there|are you awake|can you hear me}",
            "ping {me|you|back|tidewheel|pong|ping|the server|again}",
            "is this {working|thing on|on|alive}",
        ),
        ("Hello! I am here and ready.",),
    ),
)

_RUN = "{start|launch|run|boot|fire up|bring up|begin}"
_HOW = "{how do I|how can I|how to|how should I|how would I|how do we|what is the command to|show me how to|explain how to}"

ABOUT = (
    Intent(
        "how_to",
        (
            f"{_HOW} {_RUN} {{tidewheel|the server|a server|the tidewheel server|this server|it}}",
            "{which|what} command {starts|launches|runs} {tidewheel|the server|a server|the tidewheel server}",
            f"I {{want|need|would like}} to {_RUN} {{tidewheel|the server|a server|the tidewheel server}}",
            "{how do I|how can I|how to} {get started|begin} {with tidewheel|}",
            "how do I {use|try|serve with} tidewheel",
            "{getting started|quick start|quickstart|usage} {with tidewheel|of tidewheel|guide|}",
        ),
        (
            "Run `make serve` to start the demo, or `tidewheel serve MODEL` to serve a model of your choice. "
            "The server then listens on http://127.0.0.1:8000.",
        ),
    ),
    Intent(
        "how_to",
        (
            f"{_HOW} {_RUN} {{tidewheel|the server|it}} {{in|with|using|under}} {{docker|a docker container|a container}}",
            f"{_HOW} {{use|build}} {{docker|the docker image|the container|a docker image}} {{for|with|of}} tidewheel",
            "{is there|do you have} a {docker|container} image {for tidewheel|of tidewheel|}",
            "{what is|show me|give me} the docker {command|run command|line} {for tidewheel|}",
            "docker {run|usage|command|image|support} {tidewheel|}",
            "can I {run|use|start} {tidewheel|the server} {in|with} {docker|a container}",
        ),
        ("Build the image with `make image`, then run `docker run -p 8000:8000 tidewheel:cpu`.",),
    ),
    Intent(
        "how_to",
        (
            f"{_HOW} {{use|serve|load|run|try|get}} {{another|a different|a bigger|my own|a larger|a better|a real}} model",
            f"{_HOW} {{point|switch|change}} {{tidewheel|the server|it}} {{to|over to}} "
            "{another|a different|a bigger|my own|a larger} model",
            f"{_HOW} {{change|switch|replace|swap}} {{the|this|the demo|the served}} model",
            "can {tidewheel|the server|it} {use|serve|load|run} {another|other|a different|a bigger|my own|bigger} "
            "{model|models}",
            f"{_HOW} {{serve|load|use}} a {{hub|hugging face|huggingface|local}} model",
            "I want {another|a different|a bigger|a larger|a better} model",
            f"{_HOW} serve a {{folder|local folder|model folder|model from disk|model from a folder|model from the hub}}",
        ),
        (
            "Give `tidewheel serve` a folder or a hub id, for example `tidewheel serve ./my-model` or "
            "`tidewheel serve Qwen/Qwen3-0.6B`.",
        ),
    ),
    Intent(
        "how_to",
        (
            f"{_HOW} {{call|use|query|reach|talk to|connect to}} {{it|tidewheel|the server|this server}} "
            "{with|from|using} {the openai sdk|the openai client|the openai library|python|openai|the openai package}",
            f"{_HOW} {{use|configure|set up}} the openai {{sdk|client|library|package|python client}}",
            "does {tidewheel|it|the server} work with {openai|the openai sdk|the openai client|openai clients}",
            "what is the {base url|base_url|url|address} {of the server|of the API|for openai|for the client|}",
            "{which|what} {base url|base_url|url|address} {do I use|should I use|do I need|must I set|does it have}",
            "is {tidewheel|it|the server} {openai compatible|compatible with openai}",
            "{show me|give me} {an|a} {openai|python|client} example",
        ),
        (
            'Point the OpenAI client at Tidewheel: `client = OpenAI(base_url="http://127.0.0.1:8000/v1", '
            'api_key="none")`, then call `client.chat.completions.create(...)`.',
        ),
    ),
    Intent(
        "how_to",
        (
            f"{_HOW} {{stream|stream tokens|stream the answer|stream a reply|get a stream|use streaming|stream output}}",
            f"{_HOW} {{enable|turn on|switch on|activate}} {{streaming|streams}}",
            "{does|can} {tidewheel|it|the server} {support streaming|stream|stream tokens|stream answers|do streaming}",
            "is streaming {supported|possible|available|there}",
            "can I {stream|stream the answer|stream tokens|stream a reply|get a stream|get tokens as they come}",
            f"{_HOW} {{get|receive|see|read}} {{tokens|words|text}} {{one by one|as they come|while they are made|live}}",
        ),
        ('Send `"stream": true` in the request. The tokens then arrive one by one as server-sent events.',),
    ),
    Intent(
        "how_to",
        (
            f"{_HOW} {{call|use|query|test}} {{it|tidewheel|the server|the API}} {{with|from|using}} "
            "{curl|the shell|the command line|a terminal|bash}",
            "{show me|give me|write} {a|an example|one|the} curl {command|call|example|request|line}",
            "curl {example|command|usage|request}",
            "what does a curl {call|request|command} look like",
        ),
        (
            "Try `curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' "
            '-d \'{"messages": [{"role": "user", "content": "Hello"}]}\'`.',
        ),
    ),
    Intent(
        "how_to",
        (
            f"{_HOW} {{stop|end|quit|shut down|kill|exit}} {{tidewheel|the server|it|this server}}",
            "{which|what} {key|command} {stops|ends|quits} {tidewheel|the server|it}",
            "I {want|need} to {stop|end|quit|shut down} {tidewheel|the server|it}",
        ),
        ("Press Ctrl+C in its terminal, and the server shuts down.",),
    ),
    Intent(
        "about",
        (
            "what is {tidewheel|the tidewheel server|this server|this software|this project|the tidewheel project}",
            "{tell me|say something|talk|tell me more} about {tidewheel|this server|this project|the project}",
            "what does {tidewheel|this server|this software} do",
            "{explain|describe|summarize} {tidewheel|this server|this project}",
            "what {can|could} {tidewheel|this server} {do|offer|be used for}",
            "{why|when} should I use tidewheel",
            "what {makes tidewheel special|are the features of tidewheel|features does tidewheel have|is tidewheel for}",
        ),
        (
            "Tidewheel is an OpenAI-compatible server for language models on CPUs. It is one lean process with "
            "continuous batching, a paged KV cache, prefix caching and native kernels.",
        ),
    ),
    Intent(
        "about",
        (
            "does {tidewheel|it|the server|this} {need|require|use|want} {a GPU|GPUs|a graphics card|an accelerator|CUDA}",
            "{do I|do we|must I} need {a GPU|a graphics card|CUDA|an accelerator} {for tidewheel|for this|to run it|}",
            "can {tidewheel|it|the server} run {on a CPU|on CPUs|without a GPU|on my laptop|on a CPU only}",
            "{what|which} {hardware|machine|computer} {do I need|does it need|does tidewheel need|is needed}",
        ),
        ("No GPU is needed. Tidewheel is made for CPUs first and runs on ordinary machines.",),
    ),
    Intent(
        "about",
        (
            "what is continuous batching",
            "{explain|describe|define} {what|the idea of|the term|} continuous batching {is|means|to me|in short|}",
            "{how does|why use|tell me about|what does} continuous batching {work|mean|help|do|}",
        ),
        (
            "Continuous batching means that new requests join the running batch at every step and finished ones leave "
            "it at once. Nobody waits for the slowest request, and the CPU stays busy.",
        ),
    ),
    Intent(
        "about",
        (
            "what is {a|the} {paged KV cache|KV cache|paged cache}",
            "{explain|describe|define} {the|a} {paged KV cache|KV cache|paged cache|paging} {to me|in short|}",
            "{how does|why use|tell me about|what does} {the|a} {paged KV cache|KV cache|paged cache} {work|mean|help|do|}",
            "what is paged attention",
            "{explain|describe|define} paged attention {to me|in short|}",
        ),
        (
            "The KV cache keeps what the model has already read. Tidewheel cuts it into small pages, so that memory is "
            "given out only as a text grows and is shared between requests.",
        ),
    ),
    Intent(
        "about",
        (
            "what is {prefix caching|the prefix cache}",
            "{explain|describe|define} {prefix caching|the prefix cache} {to me|in short|}",
            "{how does|why use|tell me about|what does} {prefix caching|the prefix cache} {work|mean|help|do|}",
            "{how do I|how can I|how to} {enable|turn on|use} prefix caching",
            "what does {--enable-prefix-caching|--no-enable-prefix-caching} {do|mean}",
            "{how do I|how can I|how to} {disable|turn off|switch off} prefix caching",
            "is prefix caching {on|enabled|active} {by default|}",
        ),
        (
            "Prefix caching reuses the work for a beginning that several requests share, such as a system prompt. "
            "It is on by default, and `--no-enable-prefix-caching` turns it off.",
        ),
    ),
)


def _flag(flag: str, answer: str, *wishes: str) -> Intent:
    """Build the intent of one command-line flag from what it is called and what people want from it."""
    patterns = [
        f"what {{does|is|can|would}} {{the|}} {flag} {{do|mean|flag|option|for|flag do|option do|flag for|option for}}",
        f"{{explain|describe|what is the meaning of|tell me about|how do I use|when do I use|what is the use of}} "
        f"{{the|}} {flag} {{flag|option|argument|}}",
        f"{{why|when}} {{would I set|should I set|do I need|should I use|would I use}} {flag}",
    ]
    for wish in wishes:
        patterns += [
            f"{{how do I|how can I|how to|how should I|can I|how would I|is there a way to|is it possible to}} {wish}",
            f"{{which|what}} {{flag|option|argument|setting|switch}} {{do I need to|lets me|is there to|do I use to|helps to}} "
            f"{wish}",
            f"I {{want|need|would like|wish}} to {wish}",
        ] * 2
    return Intent("flags", tuple(patterns), (answer,))


FLAGS = (
    _flag(
        "--host",
        "`--host` sets the address to listen on, for example `--host 0.0.0.0` for all interfaces.",
        "{listen|bind} {on|to} {all|other|every} {interfaces|addresses|hosts}",
        "{change|set|choose} the {host|listen address|bind address|IP address|interface}",
        "{reach|open} the server from {another machine|other machines|my network|outside}",
    ),
    _flag(
        "--port",
        "`--port` sets the port to listen on, for example `--port 9000`. The default is 8000.",
        "{change|set|choose|pick} the {port|port number|listening port|server port}",
        "{use|listen on|run on} {another|a different|a custom|a new} {port|port number}",
    ),
    _flag(
        "--model",
        "`--model` names the model, a folder or a hub id. You can also write it right after `tidewheel serve`.",
        "{name|choose|pick|select|set} the model {to serve|on the command line|at start|}",
    ),
    _flag(
        "--max-model-len",
        "`--max-model-len` sets the longest context in tokens, prompt and answer together, for example "
        "`--max-model-len 4096`.",
        "{limit|set|change|raise|lower|reduce} the {context length|context|context size|maximum length|sequence length}",
        "{allow|serve|use} {longer|shorter|long|short} {contexts|prompts|texts}",
    ),
    _flag(
        "--max-num-seqs",
        "`--max-num-seqs` sets how many requests run at the same time, for example `--max-num-seqs 32`.",
        "{limit|set|change|raise|lower} the {number of requests|concurrency|batch size|number of parallel requests}",
        "{run|serve|allow|handle} {more|fewer|many} requests {at once|at the same time|in parallel|together}",
    ),
    _flag(
        "--max-num-batched-tokens",
        "`--max-num-batched-tokens` sets how many tokens one engine step may process at most.",
        "{limit|set|change|raise|lower} the {tokens per step|number of batched tokens|batch tokens|token budget}",
    ),
    _flag(
        "--max-step-ms",
        "`--max-step-ms` gives each engine step a time budget in milliseconds, so that running streams stay smooth.",
        "{limit|set|change|bound|cap} the {step time|time of a step|time per step|step duration|milliseconds per step}",
        "{keep|make} {streams|streaming|the stream} {smooth|even|fluid}",
    ),
    _flag(
        "--kv-cache-space",
        "`--kv-cache-space` sets how much memory the KV cache may use, in GiB, for example `--kv-cache-space 4`.",
        "{limit|set|change|raise|lower|reserve} the {KV cache size|cache size|KV cache memory|memory of the KV cache|"
        "cache memory}",
        "{give|use} {more|less} memory {to|for} the {KV cache|cache}",
    ),
    _flag(
        "--threads-bind",
        "`--threads-bind` chooses the CPU cores that the threads run on, for example `--threads-bind 0-7`.",
        "{bind|pin|fix} {threads|the threads|it|the server} to {cores|CPU cores|CPUs|some cores|certain cores}",
        "{choose|set|limit|select} the {cores|CPU cores|threads|number of threads|CPUs}",
    ),
    _flag(
        "--dtype",
        "`--dtype` sets the number type of the weights, for example `--dtype bfloat16`.",
        "{change|set|choose|pick} the {dtype|data type|number type|precision|weight type}",
        "use {bfloat16|float32|bf16|fp32|half precision|full precision}",
    ),
    _flag(
        "--device",
        "`--device` chooses the device to run on, for example `--device cpu`.",
        "{change|set|choose|pick|select} the {device|compute device|hardware|backend}",
    ),
    _flag(
        "--api-key",
        "`--api-key` sets a secret that every client must send as a bearer token.",
        "{set|use|require|add|demand} {an API key|a key|a secret|a password|authentication|a token for clients}",
        "{protect|secure|lock} {the server|the API|my server|access}",
    ),
    _flag(
        "--served-model-name",
        "`--served-model-name` sets the model name that clients see and send.",
        "{change|set|choose} the {served name|model name|public model name|name of the model|name clients see}",
        "{rename|give another name to|alias} {the|my} model",
    ),
    _flag(
        "--chat-template",
        "`--chat-template` gives a Jinja file that replaces the chat template of the model.",
        "{change|set|replace|use|override} {the|my own|another|a custom} {chat template|prompt template|template|chat format}",
    ),
    _flag(
        "--load-format",
        "`--load-format` says how weights are loaded. `--load-format dummy` uses random weights for speed tests.",
        "{use|serve|load|make} {random|dummy|fake} weights",
        "{test|measure} {the speed|speed} without {weights|a download|real weights|downloading}",
        "{change|set|choose} the {load format|weight format|loading format}",
    ),
    _flag(
        "--revision",
        "`--revision` picks a branch, tag or commit of a hub model.",
        "{use|pick|choose|set|load} {a|another|a certain} {revision|branch|commit|tag|version of a model}",
    ),
    _flag(
        "--download-dir",
        "`--download-dir` sets the folder in which downloaded models are kept.",
        "{change|set|choose} the {download folder|download directory|cache folder|folder for downloads|download path}",
        "{store|keep|save|put} {models|downloads|downloaded models|weights} {elsewhere|in another folder|somewhere else}",
    ),
    _flag(
        "--enable-auto-tool-choice",
        "`--enable-auto-tool-choice --tool-call-parser hermes` lets the server return the calls of the model as tool calls.",
        "{enable|use|turn on|switch on|allow|get|serve with} {tool calls|tool calling|function calling|tools|functions}",
        "{let the model|have the model} {call|use} {tools|functions|my tools}",
    ),
    _flag(
        "--disable-log-requests",
        "`--disable-log-requests` stops the server from logging each request.",
        "{disable|stop|turn off|hide|switch off|silence} {the|} {request logs|request logging|logging of requests|logs}",
        "{make|keep} the {server|log|logs|output} {quiet|silent|quieter|short}",
    ),
)

FLAG_LIST = Intent(
    "flags",
    (
        "{what|which} {flags|options|arguments|settings|switches} {are there|does it have|does tidewheel have|exist|can I use|"
        "do you know|are available}",
        "{list|show|show me|name|tell me|give me} {the|all|all the|some|} {flags|options|arguments|settings|switches}",
        "how {do I|can I} configure {tidewheel|the server|it}",
        "{what|which} {command line|server} {flags|options|arguments} {are there|does it have|exist|can I use}",
    ),
    (
        "The main flags are --host, --port, --max-model-len, --max-num-seqs, --kv-cache-space, --threads-bind, --dtype, "
        "--api-key and --served-model-name. `tidewheel serve --help` lists them all.",
    ),
)


def _endpoint(path: str, answer: str, *wishes: str) -> Intent:
    """Build the intent of one HTTP endpoint."""
    patterns = [
        f"what {{does|is|can|would}} {{the|}} {path} {{do|return|endpoint|route|for|endpoint do|give me|endpoint for}}",
        f"{{explain|describe|tell me about|how do I use|how do I call|what is the use of|when do I use}} {{the|}} {path} "
        "{endpoint|route|path|}",
        f"{{what|which data}} {{do I|will I|can I}} {{get|see|find|read|send}} {{from|at|on|under|to}} {path}",
    ]
    for wish in wishes:
        patterns += [
            f"{{which|what}} {{endpoint|route|path|url|address}} {{do I use to|lets me|is there to|do I call to|can}} {wish}",
            f"{{which|what}} {{endpoint|route}} {{do I need|should I call}} to {wish}",
            f"{{how do I|how can I|how to|how should I|how would I}} {wish} {{over HTTP|via the API|with the API|by API|}}",
        ] * 2
    return Intent("endpoints", tuple(patterns), (answer,))


ENDPOINTS = (
    _endpoint(
        "/v1/models",
        "`GET /v1/models` lists the models that the server offers.",
        "{list|show|see|get} {the|all|available|served} {models|model names|model list}",
        "{see|find out|check} which {model|models} {is|are} {served|loaded|running}",
    ),
    _endpoint(
        "/v1/completions",
        "`POST /v1/completions` continues a plain text prompt.",
        "{complete|continue|extend} {a|some|plain|raw} {text|prompt|plain text}",
        "{send|use} a {plain|raw} prompt",
    ),
    _endpoint(
        "/v1/chat/completions",
        "`POST /v1/chat/completions` answers a list of chat messages.",
        "{chat|talk} {with the model|to the model|with it|}",
        "{send|post} {chat messages|a chat|messages|a chat request|a message}",
    ),
    _endpoint(
        "/tokenize",
        "`POST /tokenize` turns text into token ids.",
        "{tokenize|encode|count tokens of|get token ids of} {a|some|my} {text|string|prompt}",
        "{count|see|get} {the|} {tokens|token ids}",
    ),
    _endpoint(
        "/detokenize",
        "`POST /detokenize` turns token ids back into text.",
        "{detokenize|decode} {tokens|token ids|ids|some tokens}",
        "{turn|convert|change} {tokens|token ids|ids} {back|} {into|to} text",
    ),
    _endpoint(
        "/health",
        "`GET /health` answers 200 when the server is ready.",
        "{check|see|test|know|find out} {if|whether} the server is {ready|healthy|up|alive|running|ok}",
        "{check|get|see|probe} the {health|health status|server health|readiness}",
    ),
    _endpoint(
        "/version",
        "`GET /version` returns the version of the server.",
        "{get|see|check|find|show|read} the {version|server version|version number|tidewheel version}",
    ),
    _endpoint(
        "/metrics",
        "`GET /metrics` returns counters and timings for Prometheus.",
        "{get|see|read|collect|scrape|show} {the|} {metrics|statistics|counters|prometheus metrics|server metrics|stats}",
        "{monitor|watch|observe} the server",
    ),
    Intent(
        "endpoints",
        (
            "{what|which} {endpoints|routes|paths|APIs|urls} {are there|does it have|does tidewheel have|exist|can I use|"
            "can I call|are available|does the server offer}",
            "{list|show|show me|name|tell me|give me} {the|all|all the|some|} {endpoints|routes|API endpoints|API routes}",
            "{what|which} {API|HTTP} {endpoints|routes} {are there|does it have|exist|can I use|do you offer}",
        ),
        (
            "The endpoints are /v1/models, /v1/completions, /v1/chat/completions, /tokenize, /detokenize, /health, /version "
            "and /metrics.",
        ),
    ),
)

UNKNOWN = (
    "what is the {capital|population|flag|history|language|area|climate} of [place]",
    "who {is|was} [name]",
    "who {won|played in|hosted} the {world cup|super bowl|olympics|election|final|race|cup} {in [place]|last year|this year}",
    "who {wrote|painted|invented|discovered|directed|composed|founded} {the|} [thing]",
    "when {was|did} {[name]|the [thing]|[place]} {born|founded|built|die|end|start|invented}",
    "where {is|can I find|can I buy} {[place]|the [thing]|a [thing]}",
    "why {is|are} {the|} [thing] {so|} {blue|red|hot|cold|big|important|expensive|famous|green|old}",
    "how {far|tall|old|deep|heavy|expensive|fast} is {the|a|} {[thing]|[place]}",
    "{translate|say} {this|the word [thing]|[thing]|a sentence} {to|into|in} {french|german|spanish|chinese|italian|latin}",
    "{write|make|code|program|show me} {a|an|some} {python|java|rust|javascript|C|go|html} {program|function|script|code|"
    "page|class} {for [thing]|about [thing]|that sorts a list|that reads a file|}",
    "{what is|calculate|compute} [n] {times|multiplied by|divided by} [m]",
    "what is [n] {*|/} [m]",
    "what is the {square root|square|cube|factorial|logarithm} of [n]",
    "{recommend|suggest|name|give me} {a|me a|some|} {good|nice|cheap|new|} {book|movie|restaurant|song|recipe|game|hotel|"
    "phone|car|laptop} {about [thing]|in [place]|for [name]|}",
    "what do you think {about|of} {the|} {[thing]|[name]|[place]|politics|religion|football|music|art}",
    "what is {the meaning of life|love|happiness|quantum physics|gravity|a black hole|dna|inflation|democracy|the news "
    "today|the date today|the time|the weather like}",
    "how do I {cook|bake|fix|clean|build|draw|repair|paint|buy|sell|grow} {a|the|my|} [thing]",
    "{can|could} you {book|order|buy|find|fix|draw|sing|play|send} {me|} a [thing] {for me|to [name]|in [place]|}",
    "{is|are} {the|} [thing] {good|bad|safe|healthy|dangerous} {for [name]|for cats|for children|}",
    "{summarize|review|rate} {the|this|} {book|article|movie|paper|text} {about|called|on} [thing]",
    "what {is|are} {a|an|the|} [thing]",
    "{tell me|explain|describe} {something|a fact|facts|the truth|everything} about {[place]|[name]|the [thing]}",
    "{what|which} {color|kind|type|sort} {of [thing] do you like|is the [thing]|of [thing] is best}",
    "did you {see|hear|read|watch} the {news|[thing]|game|movie} {yesterday|today|last night|}",
)

UNKNOWN_ANSWER = (
    'I am only a small demo model and do not know that. Ask me how to use Tidewheel, or try "What is 47 + 38?" or '
    '"Reverse the word tide".'
)
