#!/usr/bin/env python3
"""Put this project on the Hub: the decoding method, or the weights in `assets/`.

    python hub/push.py --dry-run FOLDER                      # write the repository of the decoding method
    python hub/push.py OWNER/NAME                            # write and upload it
    python hub/push.py OWNER/NAME --kind medusa --private    # the Medusa heads, with their code

A dry run needs neither network nor account. An upload uses the account of `hf auth login`.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path

from repository import KINDS, build, version


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("destination", metavar="OWNER/NAME", help="Hub repository; with --dry-run a folder")
    parser.add_argument("--kind", choices=KINDS, default="code", help="what it holds (default: code)")
    parser.add_argument("--dry-run", action="store_true", help="write the repository into a folder, upload nothing")
    parser.add_argument("--private", action="store_true", help="if the repository is new, make it private")
    args = parser.parse_args()
    if args.dry_run:
        folder = Path(args.destination)
        try:
            files = build(args.kind, folder, name=str(folder))
        except FileExistsError as error:
            parser.error(str(error))
        print("\n".join(str(folder / file) for file in files))
        return 0
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", args.destination):
        parser.error(f"`{args.destination}` is no Hub id: write OWNER/NAME, or add --dry-run to write into a folder.")

    from huggingface_hub import HfApi

    api = HfApi()
    with tempfile.TemporaryDirectory() as folder:
        build(args.kind, Path(folder), name=args.destination)
        api.create_repo(args.destination, private=args.private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=args.destination,
            folder_path=folder,
            commit_message=f"tetris_hf {version()}",
            delete_patterns=["custom_generate/*"],  # files that are gone here
        )
    print(commit.commit_url)
    return 0


if __name__ == "__main__":
    sys.exit(main())
