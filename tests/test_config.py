"""The configuration file: what is accepted, what is refused, in which words and with which line.

tests/data/config/bad holds bad files (.yaml), each with the lines that are told of it (.txt). Run
as a program, this file renews those lines; read the difference before you keep it.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from calinix.config import Config, PodConfig, Strategy, effective, expanded, load_config
from calinix.config import parse_config as parse
from calinix.config.describe import structs
from calinix.config.fields import SECRET_FIELDS, SECRET_KEYS
from calinix.config.source import MAX_FILE_BYTES, MAX_NODES, MAX_PROBLEMS
from calinix.config.walk import is_secret
from calinix.errors import ConfigError

DATA = Path(__file__).parent / "data" / "config"
BAD = sorted((DATA / "bad").glob("*.yaml"))
GOOD = (DATA / "good.yaml").read_text()
ENVIRON = {"SET": "sk-0123456789", "EMPTY": "", "SPACED": "hunter2 and more\n"}
PODS = "upstreams: {single: {pods: [{id: p, url: 'http://p:1'}]}}\n"


def problems(text: str | bytes, filename: str = "c.yaml") -> list[str]:
    """What is told of a file that cannot be used; empty for one that can."""
    try:
        parse(text, filename, environ=ENVIRON)
    except ConfigError as error:
        return error.problems
    return []


def pod_of(text: str) -> PodConfig:
    """The one single pod of a file."""
    single = parse(text, environ=ENVIRON).upstreams.single
    assert single is not None
    return single.pods[0]


# --- what is accepted ----------------------------------------------------------------------------


def test_the_first_example_is_valid_as_it_stands() -> None:
    """The configuration that users of the ancestor have loads, with every value where it was."""
    config = load_config(DATA / "good.yaml")
    assert config.gateway.port == 8080
    assert config.gateway.strategy == "cacheAware"
    assert config.health.unhealthy_threshold == 3
    assert config.cache_registry.stale_ttl_ms == 30_000
    assert config.upstreams.single is not None
    assert [pod.id for pod in config.upstreams.single.pods] == ["single-1", "single-2"]
    assert config.upstreams.dispatch is not None
    assert config.upstreams.dispatch.decode.pods[1].url == "http://decode-2:8000"


def test_what_is_left_out_has_its_default() -> None:
    """A file with nothing but a pod gives the defaults of the structs, `version` included."""
    config = parse(PODS)
    assert config == Config(upstreams=config.upstreams)
    assert config.version == 1


@pytest.mark.parametrize(
    "data",
    [
        PODS.encode(),
        b"\xef\xbb\xbf" + PODS.encode(),
        ("version: 1\r\n" + PODS.replace("\n", "\r\n")).encode(),
        ("version: 1\r" + PODS).encode(),
        PODS.rstrip().encode(),
        ("---\n" + PODS + "...\n").encode(),
    ],
    ids=["plain", "bom", "crlf", "cr", "no-newline", "markers"],
)
def test_line_ends_and_marks_do_not_matter(data: bytes) -> None:
    """A byte order mark, any line end and YAML's document markers give the same configuration."""
    assert parse(data) == parse(PODS)


def test_lines_are_counted_the_same_with_crlf() -> None:
    """A file from Windows is told of with the right lines."""
    text = "version: 1\n\ngateway:\n  stratgy: x\n" + PODS
    assert problems(text) == problems(text.replace("\n", "\r\n"))
    assert problems(text)[0].startswith("c.yaml:4: gateway.stratgy: ")


def test_strategy_is_a_name_or_a_mapping() -> None:
    """The short and the long form of `strategy` mean the same."""
    short = parse("gateway: {strategy: powerOfTwo}\n" + PODS)
    long = parse("gateway: {strategy: {name: powerOfTwo}}\n" + PODS)
    assert long.gateway.strategy == Strategy(name="powerOfTwo")
    assert effective(short) == effective(long)


def test_model_is_short_for_models() -> None:
    """`model: x` and `models: [x]` give equal pods, from a file and in Python."""
    one = pod_of("upstreams: {single: {pods: [{id: p, url: 'http://p:1', model: x}]}}")
    many = pod_of("upstreams: {single: {pods: [{id: p, url: 'http://p:1', models: [x]}]}}")
    assert one == many == PodConfig(id="p", url="http://p:1", model="x")
    assert one.models == ("x",)
    with pytest.raises(ValueError, match="not both"):
        PodConfig(id="p", url="http://p:1", model="x", models=("y",))


def test_anchors_and_merges_work() -> None:
    """A merged mapping gives what its own keys do not; an own key wins, and is no duplicate."""
    config = parse(
        "upstreams:\n  single:\n    pods:\n"
        "      - &base {id: a, url: 'http://a:1', maxConns: 7, model: x}\n"
        "      - {<<: *base, id: b, url: 'http://b:1'}\n"
        "      - {<<: [{id: c, maxConns: 9}, *base], url: 'http://c:1'}\n"
    )
    assert config.upstreams.single is not None
    pods = config.upstreams.single.pods
    assert [(pod.id, pod.max_conns, pod.models) for pod in pods] == [
        ("a", 7, ("x",)),
        ("b", 7, ("x",)),
        ("c", 9, ("x",)),
    ]


@pytest.mark.parametrize(
    ("url", "kept"),
    [
        ("http://host", "http://host"),
        ("http://host/", "http://host"),
        ("HTTPS://Pod_1.internal:8443/", "https://Pod_1.internal:8443"),
        ("http://[::1]:8000", "http://[::1]:8000"),
        ("http://10.0.0.1:80", "http://10.0.0.1:80"),
    ],
)
def test_good_urls_are_kept_in_one_form(url: str, kept: str) -> None:
    """A pod's URL comes out with a lower-case scheme and without a trailing slash."""
    assert pod_of(PODS.replace("http://p:1", url)).url == kept


def test_secrets_come_from_the_environment() -> None:
    """`${NAME}` is replaced in apiKey and apiKeys, alone or within a text."""
    config = parse(
        "gateway: {apiKeys: ['${SET}', 'a-${SET}-z', plain, '$$x']}\n"
        "upstreams: {single: {pods: [{id: p, url: 'http://p:1', apiKey: '${SET}'}]}}\n",
        environ=ENVIRON,
    )
    assert config.gateway.api_keys == ("sk-0123456789", "a-sk-0123456789-z", "plain", "$$x")
    assert config.upstreams.single is not None
    assert config.upstreams.single.pods[0].api_key == "sk-0123456789"


def test_only_secrets_are_expanded() -> None:
    """A `${NAME}` elsewhere is text: a file cannot pull the environment into what is shown."""
    assert parse("gateway: {host: '${SET}'}\n" + PODS, environ=ENVIRON).gateway.host == "${SET}"


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("path", BAD, ids=lambda path: path.stem)
def test_bad_files_are_told_of(path: Path) -> None:
    """Each bad file gives exactly its lines: file, line, key, what was expected and found."""
    expected = path.with_suffix(".txt").read_text("utf-8").splitlines()
    assert problems(path.read_bytes(), path.name) == expected
    assert expected


@pytest.mark.parametrize("path", BAD, ids=lambda path: path.stem)
def test_problems_can_be_printed_and_hide_secrets(path: Path) -> None:
    """Problems are short printable lines without any of the secrets of the bad files."""
    for line in problems(path.read_bytes(), path.name):
        assert line.isprintable()
        assert len(line) < 300
        assert not any(secret in line for secret in ("hunter2", "31337", ENVIRON["SET"]))


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"a: 1\nb: \xff\n", "c.yaml:2: not UTF-8 text (byte 0xff)"),
        (PODS.encode("utf-16"), "c.yaml:1: not UTF-8 text (byte 0xff)"),
        (b"\x00", "c.yaml:1: not valid YAML: the character 0x0000 is not allowed"),
    ],
)
def test_bytes_that_are_no_text(data: bytes, told: str) -> None:
    """What is no UTF-8 or no text at all is refused with the line."""
    assert problems(data) == [told]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """A missing file, a folder and an impossible name are problems, told with the path."""
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read: ") as caught:
            load_config(path)
        assert caught.value.problems[0].startswith(f"{path}: ")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config("\0")


def test_a_file_is_bounded(tmp_path: Path) -> None:
    """A file over 4 MiB is refused, whatever is in it; the same in memory."""
    path = tmp_path / "large.yaml"
    path.write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    with pytest.raises(ConfigError, match="larger than"):
        load_config(path)
    assert problems("#" * (MAX_FILE_BYTES + 1)) == [
        f"c.yaml: larger than {MAX_FILE_BYTES} characters"
    ]


def test_a_file_of_many_values_is_refused() -> None:
    """The number of values is bounded before they are looked at."""
    assert problems("[" + "0," * MAX_NODES + "]")[0].endswith(f"more than {MAX_NODES} values")


@pytest.mark.parametrize(
    "text",
    [
        "upstreams:\n  single:\n    pods:\n"
        f"      - &p {{id: a, url: 'http://a:1', models: &m [{'x,' * 1000}]}}\n"
        + "      - *p\n"
        * 1000,
        "a: &a {x: 1}\n"
        + "".join(
            f"{new}: &{new} {{<<: [{f'*{old},' * 30}]}}\n"
            for old, new in zip("abcdef", "bcdefg", strict=True)
        )
        + "gateway: *g\n",
    ],
    ids=["aliases", "merges"],
)
def test_an_alias_bomb_is_refused(text: str) -> None:
    """What a file expands to by aliases or merges is bounded, and the bound is told."""
    bound = f"more than {MAX_NODES} values by aliases and merges"
    assert [line for line in problems(text) if line.endswith(bound)]


def test_no_more_problems_than_one_can_read() -> None:
    """A file that is wrong everywhere tells of the first hundred problems and counts the rest."""
    found = problems("".join(f"key{i}: 1\n" for i in range(150)) + PODS)
    assert len(found) == MAX_PROBLEMS + 1
    assert found[-1] == "c.yaml: and 50 more problems"


def test_all_problems_of_a_file_at_once() -> None:
    """Unknown keys, wrong types and broken rules are told together, in the order of the file."""
    found = problems(
        "gateway:\n  stratgy: x\n  port: http\n  defaultMode: dispatch\n"
        "upstreams:\n  single:\n    pods:\n      - {id: a, url: 'http://a:1'}\n"
        "      - {id: a, url: 'http://a:1/'}\n      - {id: 5}\n"
    )
    assert [line.split(":")[1] for line in found] == ["2", "3", "4", "9", "9", "10", "10"]


def test_certificates_that_are_there_pass(tmp_path: Path) -> None:
    """Both files of a certificate are looked for, and found."""
    for name in ("a.crt", "a.key"):
        (tmp_path / name).touch()
    text = f"gateway: {{tls: {{certFile: {tmp_path}/a.crt, keyFile: {tmp_path}/a.key}}}}\n"
    assert problems(text + PODS) == []


# --- secrets and the expanded configuration ------------------------------------------------------


def test_every_secret_key_is_masked_everywhere() -> None:
    """The keys that are masked are those whose type is Secret: a new one cannot be forgotten."""
    secret = {
        (field.name, field.encode_name)
        for struct in structs()
        for field in msgspec.inspect.type_info(struct).fields  # type: ignore[attr-defined]
        if is_secret(field.type)
        or any(is_secret(member) for member in getattr(field.type, "types", ()))
    }
    assert {name for name, _ in secret} == SECRET_FIELDS
    assert {key for _, key in secret} == SECRET_KEYS


def test_secrets_are_never_shown() -> None:
    """Neither `repr` nor the expanded configuration shows a key; that there is one, they do."""
    pod = PodConfig(id="p", url="http://p:1", api_key="hunter2")
    replace, bare = msgspec.structs.replace, parse(PODS)
    assert bare.upstreams.single is not None
    upstreams = replace(bare.upstreams, single=replace(bare.upstreams.single, pods=(pod,)))
    config = Config(upstreams, gateway=replace(bare.gateway, api_keys=("hunter2", "hunter2")))
    for text in (repr(config), str(config), expanded(config)):
        assert "hunter2" not in text
        assert "***" in text
    shown = yaml.safe_load(expanded(config))
    assert shown["gateway"]["apiKeys"] == ["***", "***"]
    assert shown["upstreams"]["single"]["pods"][0]["apiKey"] == "***"


@pytest.mark.parametrize(
    "text", [GOOD, PODS, "gateway: {tokenizer: words, strategy: random}\n" + PODS]
)
def test_the_expanded_configuration_is_the_same_configuration(text: str) -> None:
    """Loaded again, the expanded text gives the effective configuration, and expands to itself."""
    config = parse(text)
    again = parse(expanded(config))
    assert again == effective(config)
    assert expanded(again) == expanded(config)


def test_the_expanded_configuration_holds_every_key() -> None:
    """Each key of each struct that the file reaches is there, with what it amounts to."""
    shown = yaml.safe_load(expanded(parse(GOOD)))
    assert shown["gateway"]["strategy"]["imbalance"] == {
        "enabled": True,
        "factor": 1.5,
        "offset": 4.0,
        "copyOffset": 1.0,
    }
    assert shown["gateway"]["blockSize"] == 128
    assert shown["gateway"]["defaultMode"] == "single"
    assert set(shown) == {field.encode_name for field in msgspec.structs.fields(Config)}


# --- any input -----------------------------------------------------------------------------------


@given(st.binary(max_size=400))
def test_any_bytes_give_a_config_or_its_error(data: bytes) -> None:
    """No bytes make the loader raise anything but ConfigError."""
    problems(data)


YAMLISH = st.text(alphabet=" \n\t:-{}[],&*!|>'\"#%@`?<~$0123456789.eExob_truefalsnyi=ü\ud800\x85")


@given(YAMLISH)
def test_any_yaml_like_text_gives_a_config_or_its_error(text: str) -> None:
    """Nor does text made of what YAML gives a meaning to."""
    problems(text)


@given(st.data())
def test_a_damaged_file_gives_a_config_or_its_error(data: st.DataObject) -> None:
    """Nor does a good file in which some lines are cut, doubled, moved or changed."""
    lines = GOOD.splitlines()
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(lines) - 1))
        piece = data.draw(st.one_of(YAMLISH, st.sampled_from(lines)))
        cut = data.draw(st.integers(0, len(lines[at])))
        lines[at] = lines[at][:cut] + piece
        lines.insert(data.draw(st.integers(0, len(lines))), lines[at])
    for line in problems("\n".join(lines)):
        assert line.startswith("c.yaml")
        assert line.isprintable()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)


@given(st.data())
def test_any_value_at_any_key_gives_a_config_or_its_error(data: st.DataObject) -> None:
    """Nor does any value at any key of the whole expanded file; what passes, passes again."""
    tree = yaml.safe_load(expanded(parse(GOOD)))
    node = tree
    while isinstance(node, dict | list) and node:
        key = data.draw(st.sampled_from(range(len(node)) if isinstance(node, list) else list(node)))
        if not isinstance(node[key], dict | list) or data.draw(st.integers(0, 3)) == 0:
            node[key] = data.draw(JSON)
            break
        node = node[key]
    text = yaml.safe_dump(tree)
    if not problems(text):
        shown = expanded(parse(text, environ=ENVIRON))
        assert expanded(parse(shown, environ=ENVIRON)) == shown


if __name__ == "__main__":
    for bad in BAD:
        told = problems(bad.read_bytes(), bad.name)
        bad.with_suffix(".txt").write_text("".join(f"{line}\n" for line in told), "utf-8")
