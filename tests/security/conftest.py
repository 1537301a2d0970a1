from pathlib import Path

import pytest

from tests.security.security_keys import Keys, MakeKeys
from tops.security import Authority, utc_now


@pytest.fixture
def make_keys(tmp_path: Path) -> MakeKeys:
    def make(cluster: str = "shop", folder: str = "keys") -> Keys:
        return Keys(Authority.init(tmp_path / folder, cluster, utc_now()))

    return make


@pytest.fixture
def keys(make_keys: MakeKeys) -> Keys:
    return make_keys()
