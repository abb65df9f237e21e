"""Private batches: the loader, its handshake with the optimizer, lengths and secret randomness."""

from dpoptim.data.lengths import pad_to_bucket
from dpoptim.data.loader import PrivateLoader, private_loader
from dpoptim.data.record_fingerprint import RecordFingerprint, fingerprint_records
from dpoptim.data.secret_randomness import secret_randomness
from dpoptim.data.shards import whole_state

__all__ = [
    "PrivateLoader",
    "RecordFingerprint",
    "fingerprint_records",
    "pad_to_bucket",
    "private_loader",
    "secret_randomness",
    "whole_state",
]
