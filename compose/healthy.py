"""The health check of the product's containers: exit 0 if the address in TOPS_HEALTH_URL answers with success."""

import os
import sys
import urllib.error
import urllib.request

TIMEOUT_S = 4.0


def main() -> int:
    address = os.environ["TOPS_HEALTH_URL"]
    try:
        with urllib.request.urlopen(address, timeout=TIMEOUT_S):
            return 0
    except (OSError, urllib.error.HTTPError) as error:
        print(f"{address}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
