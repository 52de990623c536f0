"""Every metric that a dashboard or an alert names is there on a running server, with the labels it is asked for by."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from deployed import VLLM, alerts, family, labels, metrics, panels, unserved
from e2e_helpers import Running, running, settings
from helpers import picture
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from mmserve.errors import InvalidArgument, MMServeError


@pytest.fixture(scope="module")
def served() -> Iterator[dict[str, set[str]]]:
    """Label names by family, on a server that has seen what makes each of them appear."""
    config = settings(server={"metrics_prefixes": ("vllm:",), "auth_tokens": ("a-token",)})
    with running(config) as server:
        yield asked(server)


def asked(server: Running) -> dict[str, set[str]]:
    from mmserve.client import Client

    with Client(server.address, token="a-token", timeout=20) as client:
        client.generate("What is it?", [picture(1)], max_new_tokens=8, regex="[0-9]{3}")
        list(client.stream("What is it?", max_new_tokens=16, block_length=4, temperature=3.0))
        with pytest.raises(InvalidArgument):
            client.generate("?", temperature=-1.0)
    with pytest.raises(MMServeError):
        server.client.generate("without a token")
    text = generate_latest(server.background._server.metrics.served).decode()
    return {
        found.name: {name for sample in found.samples for name in sample.labels}
        for found in text_string_to_metric_families(text)
    }


def test_the_reader_of_expressions_sees_names_and_labels() -> None:
    expression = 'quantile(0.9, sum by (le, a) (rate(mmserve:b_bucket{c=~"$c", job="up"}[5m]))) / up{d!="x"} > 0'
    assert metrics(expression) == {"mmserve:b_bucket", "up"} and labels(expression) == {"a", "c", "d"}


def test_dashboard_and_alerts_ask_for_what_there_is(served: dict[str, set[str]]) -> None:
    expressions = [(p.title, each) for p in panels() for each in p.expressions]
    expressions += [(alert["alert"], alert["expr"]) for alert in alerts()]
    assert len(expressions) > 50
    lacking = []
    for where, expression in expressions:
        names = metrics(expression)
        assert names, where
        known = set[str]()
        for name in names - {"up"}:
            if (found := family(name)) not in served and name not in served:
                lacking.append(f"{where}: {name}")
            known |= served.get(found, set()) or served.get(name, set())
        unused = {"tenant", "limit", "code", "cache", "reason", "result"}  # labels of what has not happened here
        lacking += [f"{where}: label {label}" for label in labels(expression) - known - unused]
    assert lacking == []


def test_panels_of_vllm_have_their_metrics_or_are_listed_as_not_served(served: dict[str, set[str]]) -> None:
    for title, of in VLLM.items():
        for panel, names in of.items():
            for name in set(names) - unserved(names) - {"up"}:
                assert family(name) in served, f"{title}, {panel}: {name}"
                assert {"model_name"} <= served[family(name)]
            for name in unserved(names):
                assert family(name) not in served and name not in served, f"{name} is served after all"
    assert not any(unserved(names) for names in VLLM["prometheus_grafana/grafana.json"].values()), "all of it works"
