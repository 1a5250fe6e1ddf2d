"""Renders the chart with Helm's own library and checks all manifests against the schemas of Kubernetes.

    $ pip install helm-python-sdk kubernetes-validate pyyaml jsonschema
    $ python scripts/check_manifests.py CRD.yaml ...

The arguments are files with CustomResourceDefinitions; objects of kinds that neither they nor Kubernetes define are
named and not checked. The packages are large (330 MB) and for this alone, so `make test` does without.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python
import jsonschema
import kubernetes_validate
import yaml

DEPLOY = Path(__file__).parents[1] / "deploy"
CHART = DEPLOY / "helm" / "lorikeet"
LOADER = yaml.CSafeLoader
"""The definitions have megabytes."""
ALL_ON = {
    "args": ["--adapter-dir=/adapters"],
    "adapters": {"existingClaim": "adapters"},
    "cache": {"existingClaim": "cache"},
    "keysSecret": "keys",
    "env": [{"name": "LORIKEET_ADAPTERS__REGISTRY_URL", "value": "sqlite://"}],
    "autoscaling": {"enabled": True},
    "serviceMonitor": {"enabled": True, "labels": {"a": "b"}, "keySecret": {"name": "keys"}},
    "prometheusRule": {"enabled": True, "labels": {"a": "b"}},
    "nodeSelector": {"a": "b"},
    "tolerations": [{"operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
}


def manifests() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield all objects, each with where it comes from."""
    with helm_python.Chart.load(str(CHART)) as chart:
        for title, values in (("defaults", {}), ("everything on", ALL_ON)):
            rendered = chart.render(values, name="demo", namespace="default")
            for name, text in rendered.items():
                for each in yaml.load_all(text, LOADER):
                    if each:
                        yield f"{name} with {title}", each
    for folder in ("gateway", "kserve"):
        for file in sorted((DEPLOY / folder).glob("*.yaml")):
            for each in yaml.load_all(file.read_text(), LOADER):
                yield str(file.relative_to(DEPLOY)), each


def read_crds(files: list[str]) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the schemas of the kinds that the files define, by API version and kind."""
    schemas = {}
    for file in files:
        for crd in yaml.load_all(Path(file).read_text(), LOADER):
            if crd and crd["kind"] == "CustomResourceDefinition":
                for version in crd["spec"]["versions"]:
                    key = f"{crd['spec']['group']}/{version['name']}", crd["spec"]["names"]["kind"]
                    schemas[key] = closed(version["schema"]["openAPIV3Schema"])
    return schemas


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with unknown fields refused, as the API server does when told to be strict."""
    made = {key: closed(value) if isinstance(value, dict) else value for key, value in schema.items()}
    if isinstance(made.get("properties"), dict) and "additionalProperties" not in made:
        made["additionalProperties"] = bool(made.get("x-kubernetes-preserve-unknown-fields"))
    if made.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
    return made


def check(found: dict[str, Any], crds: dict[tuple[str, str], dict[str, Any]]) -> str:
    """Return what is wrong with an object; empty if nothing is, and ``not checked`` if its kind is unknown."""
    key = found["apiVersion"], found["kind"]
    if key in crds:
        schema = crds[key]
        # These two are checked by the API server itself.
        schema["properties"] |= {"metadata": True, "apiVersion": True, "kind": True}
        errors = jsonschema.Draft202012Validator(schema).iter_errors(found)
        return "; ".join(f"{error.json_path}: {error.message}" for error in errors)
    try:
        kubernetes_validate.validate(found, kubernetes_validate.latest_version(), strict=True)
    except kubernetes_validate.SchemaNotFoundError:
        return "not checked"
    except kubernetes_validate.ValidationError as error:
        return str(error)
    return ""


def main() -> int:
    """Print one line an object; return 1 if one is wrong."""
    print(f"Helm {helm_python.helm_sdk_version()}, Kubernetes {kubernetes_validate.latest_version()}")
    findings = helm_python.lint(str(CHART))
    print(f"lint: {findings}")
    crds, wrong = read_crds(sys.argv[1:]), 0
    for place, found in manifests():
        said = check(found, crds)
        wrong += said not in ("", "not checked")
        print(f"{place}: {found['kind']} {found['metadata']['name']}: {said or 'ok'}")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
