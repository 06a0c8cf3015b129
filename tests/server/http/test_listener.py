"""Where the server listens: Unix sockets and TLS, with certificates of clients."""

from __future__ import annotations

import json
import signal
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import trustme
from cryptography.hazmat.primitives import serialization
from server.conftest import RefusedStart, StartProcess
from server.scripted_engine import SECONDS
from server.waiting import eventually

from tidewheel.engine.errors import TidewheelError
from tidewheel.server.http.tls import tls_context


@pytest.fixture
def refusal(refused_start: RefusedStart) -> Callable[..., str]:
    """The output of a server that cannot start, before it loads anything: one line for each mistake."""

    def said(*arguments: str) -> str:
        code, lines = refused_start(*arguments)
        assert code in (1, 2), lines
        first, *others = lines.splitlines()
        assert first.startswith("tidewheel serve: ")
        assert all(line.startswith("  ") for line in others)
        return lines

    return said


def test_a_unix_socket(start_process: StartProcess, refusal: Callable[..., str], tmp_path: Path) -> None:
    path = tmp_path / "server.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))  # as a killed server leaves it
    options = {"base_url": "http://server", "transport": httpx.HTTPTransport(uds=str(path))}
    server = start_process("--uds", str(path), **options)
    answer = server.client.post("/v1/completions", json={"prompt": "SAY(hi)YAS"}).json()
    assert answer["choices"][0]["text"] == "hi"
    assert f"unix:{path}" in server.log
    assert "Address already in use" in refusal("--uds", str(path))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port))
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0
    assert not path.exists()


def test_a_file_that_is_no_socket_stays(refusal: Callable[..., str], tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("mine")
    assert f"--uds {path}" in refusal("--uds", str(path))
    assert path.read_text() == "mine"


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def certificate(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, str]:
    """Paths of the authority's certificate, the server's chain, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    issued = authority.issue_cert("127.0.0.1")
    paths = tuple(str(folder / name) for name in ("ca.pem", "chain.pem", "key.pem"))
    authority.cert_pem.write_to_path(paths[0])
    for blob in issued.cert_chain_pems:
        blob.write_to_path(paths[1], append=True)
    issued.private_key_pem.write_to_path(paths[2])
    return paths[0], paths[1], paths[2]


def trusting(authority: trustme.CA, client: trustme.LeafCert | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    if client is not None:
        client.configure_cert(context)
    return context


def test_tls_with_certificates_that_are_read_again(start_process: StartProcess, tmp_path: Path) -> None:
    def issue(authority: trustme.CA) -> None:
        issued = authority.issue_cert("127.0.0.1")
        for new, blob in (("chain.pem", issued.cert_chain_pems[0]), ("key.pem", issued.private_key_pem)):
            blob.write_to_path(str(tmp_path / "new"))
            (tmp_path / "new").rename(tmp_path / new)

    def trusted(context: ssl.SSLContext) -> bool:
        try:
            return httpx.get(f"https://127.0.0.1:{server.port}/health", verify=context, trust_env=False).is_success
        except httpx.ConnectError:
            return False

    first, second = trustme.CA(), trustme.CA()
    issue(first)
    files = ("--ssl-certfile", str(tmp_path / "chain.pem"), "--ssl-keyfile", str(tmp_path / "key.pem"))
    often = {SECONDS: json.dumps({"server.http.tls:_LOOK_EVERY_S": 0.02})}
    options = {"scheme": "https", "verify": trusting(first), "environment": often}
    server = start_process(*files, "--enable-ssl-refresh", **options)
    answer = server.client.post("/v1/completions", json={"prompt": "SAY(hi)YAS", "stream": True})
    assert answer.text.endswith("data: [DONE]\n\n")
    assert f"https://127.0.0.1:{server.port}" in server.log
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{server.port}/health", trust_env=False)
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"https://127.0.0.1:{server.port}/health", trust_env=False)
    assert server.client.get("/health").status_code == 200
    (tmp_path / "chain.pem").write_text("half of it")
    eventually(lambda: trusted(trusting(first)) and "The previous certificate stays in use" in server.log, "it stays")
    issue(second)
    eventually(lambda: trusted(trusting(second)), "the new one should be in use")
    assert not trusted(trusting(first))


def test_certificates_of_clients(
    start_process: StartProcess, authority: trustme.CA, certificate: tuple[str, str, str]
) -> None:
    ca, chain, key = certificate
    arguments = ("--ssl-certfile", chain, "--ssl-keyfile", key, "--ssl-ca-certs", ca, "--ssl-cert-reqs", "required")
    known = trusting(authority, authority.issue_cert("client@example.org"))
    server = start_process(*arguments, scheme="https", verify=known)
    assert server.client.get("/health").status_code == 200
    stranger = trusting(authority, trustme.CA().issue_cert("client@example.org"))
    for context in (trusting(authority), stranger):
        with pytest.raises(httpx.TransportError):
            httpx.get(f"https://127.0.0.1:{server.port}/health", verify=context, trust_env=False)
    assert server.client.get("/health").status_code == 200


def test_files_that_are_no_certificates(certificate: tuple[str, str, str], tmp_path: Path) -> None:
    ca, chain, key = certificate
    encrypted = tmp_path / "encrypted.pem"
    private = serialization.load_pem_private_key(Path(key).read_bytes(), None)
    encryption = serialization.BestAvailableEncryption(b"password")
    formats = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
    encrypted.write_bytes(private.private_bytes(*formats))
    (tmp_path / "empty.pem").write_text("")
    empty, missing = str(tmp_path / "empty.pem"), str(tmp_path / "missing.pem")
    for arguments, said in (
        ((chain, str(encrypted), None, "none"), "the key is encrypted"),
        ((chain, ca, None, "none"), f"--ssl-keyfile {ca}"),
        ((chain, None, None, "none"), f"--ssl-certfile {chain}"),  # the key is not in it
        ((missing, key, None, "none"), "No such file"),
        ((chain, key, empty, "required"), f"--ssl-ca-certs {empty}"),
        ((chain, key, missing, "optional"), f"--ssl-ca-certs {missing}"),
    ):
        with pytest.raises(TidewheelError, match=said):
            tls_context(*arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ssl-certfile", "missing.pem"], "--ssl-certfile missing.pem"),
        (["--ssl-keyfile", "key.pem"], "--ssl-keyfile needs --ssl-certfile"),
        (["--ssl-cert-reqs", "2"], "--ssl-cert-reqs needs --ssl-certfile"),
    ],
)
def test_tls_options_that_cannot_be_used(refusal: Callable[..., str], arguments: list[str], said: str) -> None:
    assert said in refusal(*arguments)
