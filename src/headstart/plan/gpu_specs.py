"""Cards as their makers specify them, and what of that a well-written kernel was measured to reach."""

from dataclasses import dataclass

from headstart.config.errors import ConfigError

H100_COPY_SHARE = 3.0 / 3.35
"""Device copy of 3.0 TB/s, measured on an H100."""
H200_COPY_SHARE = 4.3 / 4.8
"""Device copy of 4.3 TB/s, measured on an H200."""
GEMM_SHARE = 788e12 / 989e12
"""Matrix products of 8192^3 in bfloat16: 778 to 798 TFLOP/s, measured on an H100 and an H200."""
PEER_COPY_SHARE = 393 / 450
"""Copy between two H200 over NVLink: 393 GB/s, measured."""


@dataclass(frozen=True, slots=True)
class Card:
    """One accelerator. Rates are its data sheet's; shares say how much of a rate is reached.

    `is_measured` is False where the shares are the H100's, taken over for want of a measurement.
    """

    name: str
    memory_bytes: float
    bandwidth: float  # bytes/s of its memory
    bf16_flops: float  # FLOP/s, dense
    link: float  # bytes/s to another card, one direction
    bandwidth_share: float = H100_COPY_SHARE
    flops_share: float = GEMM_SHARE
    link_share: float = PEER_COPY_SHARE
    is_measured: bool = False

    @property
    def fp8_flops(self) -> float:
        """FLOP/s, dense: twice the bfloat16 rate on all of these."""
        return 2 * self.bf16_flops


CARDS = {
    card.name: card
    for card in (
        Card("H100", 80e9, 3.35e12, 989e12, 450e9, is_measured=True),
        Card("H200", 141e9, 4.8e12, 989e12, 450e9, H200_COPY_SHARE, is_measured=True),
        Card("B200", 180e9, 8e12, 2250e12, 900e9),
        Card("H20", 96e9, 4.0e12, 148e12, 450e9),
    )
}


def card_named(name: str) -> Card:
    """Raises ConfigError naming the cards there are."""
    if name not in CARDS:
        raise ConfigError(f"--card {name}: not known; there are {', '.join(CARDS)}")
    return CARDS[name]
