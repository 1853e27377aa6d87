"""`h3-diffusion keys add|list|remove`: writes the key file of a deployment. A command of its own; nothing is served."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from diffusion_service.keys import SCOPES, add_key, read_keys, remove_key
from shared_schema.deploy.load import load_deployment
from shared_schema.errors import DeployError


class _Parser(argparse.ArgumentParser):
    """Wrong usage is an error like any other: one line."""

    def error(self, message: str) -> NoReturn:
        raise DeployError(message)


def run_keys(program: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Do what the command line says; a new key is printed once, to standard output, and kept nowhere.

    Raises:
        DeployError: wrong usage, or the key file cannot be used.
    """
    parsed = vars(_parser(program).parse_args(list(arguments)))
    file = _file(parsed["keys_file"], parsed["deploy_config"] or environment.get("H3_DEPLOY_CONFIG", ""))
    match parsed["action"]:
        case "add":
            sys.stdout.write(add_key(file, parsed["name"], tuple(dict.fromkeys(parsed["scope"]))) + "\n")
        case "remove":
            remove_key(file, parsed["name"])
        case _:
            for key in read_keys(file).keys:
                sys.stdout.write(f"{key.name}  {','.join(key.scopes)}\n")


def _parser(program: str) -> _Parser:
    place = _Parser(add_help=False)
    place.add_argument("--deploy-config", metavar="FILE", help="its service.keys_file (H3_DEPLOY_CONFIG)")
    place.add_argument("--keys-file", metavar="FILE", help="instead of a deploy file's")
    parser = _Parser(prog=f"{program} keys", description="API keys, kept as digests in a file.")
    actions = parser.add_subparsers(dest="action", required=True, metavar="add|list|remove")
    add = actions.add_parser("add", parents=[place], help="make a key and print it once")
    add.add_argument("name", help="what jobs and audit lines call it")
    add.add_argument("--scope", action="append", required=True, choices=SCOPES, help="may be repeated")
    actions.add_parser("list", parents=[place], help="names and scopes")
    remove = actions.add_parser("remove", parents=[place], help="make a key useless")
    remove.add_argument("name")
    return parser


def _file(given: str | None, deploy_config: str) -> Path:
    if given is not None:
        return Path(given)
    if not deploy_config:
        raise DeployError("name the file: --keys-file, or --deploy-config with service.keys_file in it")
    file = load_deployment(deploy_config).service.keys_file
    if file is None:
        raise DeployError(f"{deploy_config} names no service.keys_file: add it, or give --keys-file")
    return file
