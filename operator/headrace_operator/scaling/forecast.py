"""A forecast of the engines needed soon, from the same time on earlier days.

Kept as means of five minutes. The method is the seasonal mean: no trend, no model to fit.
"""

BIN = 300.0
"""Seconds of one mean."""
_DAY = int(86_400 / BIN)

Loads = tuple[tuple[int, float, int], ...]
"""(five minutes since the epoch, mean of the engines needed, number of values), oldest first."""


def record_load(loads: Loads, now: float, needed: float, days: int) -> Loads:
    """Adds a value to the mean of its five minutes and forgets what is older than `days`."""
    number = int(now // BIN)
    if not loads or loads[-1][0] < number:
        kept = tuple(load for load in loads if number - load[0] <= days * _DAY)
        return (*kept, (number, needed, 1))
    last, mean, count = loads[-1]
    return (*loads[:-1], (last, mean + (needed - mean) / (count + 1), count + 1))


def forecast_load(loads: Loads, now: float, ahead: float, days: int) -> float:
    """The most engines that earlier days needed from `now` until `ahead` seconds later.

    Each earlier day counts once, the same weekday as much as all others; 0 where none is known.
    """
    known = {number: mean for number, mean, _ in loads}
    bins = range(int(now // BIN), int((now + ahead) // BIN) + 1)
    return max(_seasonal_mean(known, number, days) for number in bins)


def _seasonal_mean(known: dict[int, float], number: int, days: int) -> float:
    values = {day: known.get(number - day * _DAY) for day in range(1, days + 1)}
    others = [value for day, value in values.items() if day % 7 and value is not None]
    weekday = [value for day, value in values.items() if day % 7 == 0 and value is not None]
    means = [sum(found) / len(found) for found in (others, weekday) if found]
    return sum(means) / len(means) if means else 0.0
