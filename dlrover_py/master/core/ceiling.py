"""The best goodput that a job can reach with the failures, recoveries and saves that it has."""

from math import exp, log1p


def best_goodput(between_s: float, recovery_s: float, save_s: float) -> tuple[float, float]:
    """Return the best goodput from 0 to 1, and the seconds between two saves that reach it.

    Failures come at random (Poisson), also during a recovery, with a mean of M seconds between two.
    A recovery takes R seconds, a save stops the training for C seconds, and a failure loses what
    was trained since the last save. With T seconds of training between two saves, the goodput is
    ``T / (M · exp(R/M) · (exp((T+C)/M) - 1))``. Its derivative is zero where
    ``log(1 - T/M) + T/M + C/M = 0``, and there it is ``(1 - T/M) · exp(-R/M)``. See J. T. Daly,
    "A higher order estimate of the optimum checkpoint interval" (FGCS 22(3), 2006).

    Args:
        between_s: M, above 0.
        recovery_s: R, at least 0.
        save_s: C, at least 0.
    """
    low, high, cost = 0.0, 1.0, save_s / between_s
    for _ in range(60):  # the left side falls with T, from C/M to minus infinity
        middle = (low + high) / 2
        if middle < 1.0 and log1p(-middle) + middle + cost > 0:
            low = middle
        else:
            high = middle
    return (1.0 - low) * exp(-recovery_s / between_s), low * between_s
