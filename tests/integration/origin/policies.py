"""Every policy, as the keys of a set with replicas r1, r2 and r3."""

POLICIES = {
    "write-all": 'policy = "write-all"',
    "quorum": 'policy = "quorum"\nwrite_quorum = 2',
    "combined": 'policy = "combined"\nsync = ["r1", "r2"]',
    "primary-site": 'policy = "primary-site"\nprimary = "r1"',
    "primary-site local": 'policy = "primary-site"\nprimary = "r1"\nack = "local"',
    "peer-to-peer": 'policy = "peer-to-peer"',
    "ordered": 'policy = "peer-to-peer"\norder = "ordered"',
    "serializable": 'policy = "serializable"',
}
