"""The client's half in a ClientApp: `ClientApp(mods=[private])` makes an existing training function private."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict

from d2pfed.deploy.client import PrivateClient, Purpose, TrainArrays, WeightedArrays, discreet, log_error
from d2pfed.deploy.config import (
    APP_SETTING,
    NODE_SETTING,
    SIMULATION_VARIABLE,
    ClientConfig,
    read_client_config,
    simulated_client_config,
)
from d2pfed.deploy.layout import NamedArrays
from d2pfed.deploy.questions import EXAMPLES, EvaluatedRecords, RecordAnswers, question_of
from d2pfed.errors import ConfigError, PeerError
from d2pfed.flower.grid import (
    EVALUATION_TYPE,
    MESSAGE_TYPE,
    from_record,
    to_array_record,
    to_named_arrays,
    to_record,
)
from d2pfed.round import Units
from d2pfed.statistics.questions import STATISTIC, MetricMeans, is_evaluation

Train = Callable[[Message, Context], Message]  # what a ClientApp's training function is

_Record = TypeVar("_Record", ArrayRecord, MetricRecord)


def private(message: Message, context: Context, train: Train) -> Message:
    """Answer a request of the private protocol, training only when it asks for the masked vector.

    Guarantee: of what `train` returns, only its arrays are used and, where the plan has weights, its `num-examples`;
    they leave in one vector, clipped, noised and masked. Its metrics and the text of its errors do not leave. Of what
    `evaluate` returns, only what a private evaluation asks for is used, in the same way. Every other kind of message
    is refused.
    Checked: test_flower_client.py::test_nothing_of_the_training_leaves_in_clear.
    """
    require_type(message, MESSAGE_TYPE, EVALUATION_TYPE)

    def call(arrays: NamedArrays, settings: Mapping[str, object]) -> NamedArrays | WeightedArrays:
        """Call the app's function as Flower would, and return the arrays with what it has made of them."""
        model = {name: array for name, array in arrays.items() if name != STATISTIC or not is_evaluation(settings)}
        config = ConfigRecord(dict(settings))  # type: ignore[arg-type]  # decode_task admits Flower's types only
        message.content = RecordDict({"arrays": to_array_record(model), "config": config})
        returned = train(message, context).content
        if not is_evaluation(settings):
            made = to_named_arrays(_only(returned.array_records, "training function", "arrays"), arrays)
            counts = [found[EXAMPLES] for found in returned.metric_records.values() if EXAMPLES in found]
            examples = counts[0] if len(counts) == 1 else None
            return WeightedArrays(made, float(examples) if isinstance(examples, (int, float)) else None)
        # The vector that answers the question: clipped, noised, masked and charged as an update is, whatever it is.
        question = question_of(settings)
        if isinstance(question, MetricMeans):
            found = _only(returned.metric_records, "evaluation", "metrics")
            numbers = {name: float(value) for name, value in found.items() if isinstance(value, (int, float))}
            if EXAMPLES not in numbers:
                raise ConfigError(f"an evaluation must return {EXAMPLES} among its metrics")
            vector = question.encode(numbers, numbers[EXAMPLES])
        else:
            scored = _only(returned.array_records, "evaluation", "arrays")
            if not {"scores", "labels"} <= set(scored):
                raise ConfigError("an evaluation of scores must return the arrays scores and labels")
            scores, labels = (np.asarray(scored[name].numpy(), np.float64) for name in ("scores", "labels"))
            vector = question.encode(scores, labels)
        return model | {STATISTIC: vector.astype(np.float32)}

    return _answer(message, context, call)


def _only(records: Mapping[str, _Record], who: str, what: str) -> _Record:
    if len(records) != 1:
        raise ConfigError(f"the {who} must return one record of {what}, got {len(records)}")
    return next(iter(records.values()))


@dataclass(frozen=True, slots=True)
class PrivateRecords:
    """Makes an app private for each of its records: `ClientApp(mods=[PrivateRecords(units)])`.

    `units` is called with the model's arrays, the configuration and the context, and returns what this silo holds under
    that model (`d2pfed.round.Units`): how many units there are, and for chosen ones the vector that each adds to the
    model, minus its gradient, say, flat in the order of the arrays. A batch of them is drawn by secret coins, each is
    clipped by itself, and their sum leaves noised and masked. The app's training function is not called.

    `evaluate`, where it is given, is called in the same way for a private evaluation, and returns what this silo holds
    as `EvaluatedRecords`: the metrics, or scores and label, of one record at a time.

    Units are asked for one at a time. `units`, `evaluate` and `count` must not fail because of a single record: then
    the silo sends noise alone. Nothing may be kept from one call to the next.

    Guarantee: neither the batch nor its size leaves; a unit whose vector cannot be had counts as zero, alone.
    Checked: test_flower_standing.py::test_records_over_flower_are_drawn_clipped_and_summed,
    test_flower_standing.py::test_a_record_that_raises_moves_the_sum_by_itself_alone.
    """

    units: Callable[[NamedArrays, Mapping[str, object], Context], Units]
    evaluate: Callable[[NamedArrays, Mapping[str, object], Context], EvaluatedRecords] | None = None

    def __call__(self, message: Message, context: Context, _train: Train) -> Message:
        """Answer a request of the private protocol."""
        require_type(message, MESSAGE_TYPE, *(() if self.evaluate is None else (EVALUATION_TYPE,)))

        def call(arrays: NamedArrays, settings: Mapping[str, object]) -> Units:
            if self.evaluate is None or not is_evaluation(settings):
                return self.units(arrays, settings, context)
            model = {name: array for name, array in arrays.items() if name != STATISTIC}
            return RecordAnswers(question_of(settings), self.evaluate(model, settings, context))

        return _answer(message, context, call)


def _answer(message: Message, context: Context, train: TrainArrays) -> Message:
    with discreet():  # Flower sends the text of whatever an app raises
        kind, data = from_record(message.content)
        purpose = Purpose.EVALUATION if message.metadata.message_type == EVALUATION_TYPE else Purpose.TRAINING
        try:
            found = config_of(context)
        except Exception:  # noqa: BLE001 - what is wrong with its files is for the client's own log
            log_error("this client's config cannot be used")
            raise ConfigError("this client is not set up; its own log says why") from None
        config = found.serving(str(context.node_config.get(APP_SETTING, "")))
        client = PrivateClient(config, message.metadata.dst_node_id, context.run_config, train, purpose)
        return Message(to_record(kind, client.answer(kind, data)), reply_to=message)


def require_type(message: Message, *types: str) -> None:
    """Refuse a request for another function of the app: the server must not choose what trains."""
    if message.metadata.message_type not in types:
        raise PeerError(f"this client answers only requests of d2pfed, which have the type {' or '.join(types)}")


def config_of(context: Context) -> ClientConfig:
    """Return the config in the directory that the SuperNode's own configuration names, or a simulated client's."""
    named = context.node_config.get(NODE_SETTING)
    if named is not None:
        return read_client_config(Path(str(named)))
    simulated = os.environ.get(SIMULATION_VARIABLE)
    if simulated is None:
        raise ConfigError(
            f"a client needs a directory: start its SuperNode with --node-config '{NODE_SETTING}=\"DIRECTORY\"', "
            f"or a simulation with {SIMULATION_VARIABLE}=DIRECTORY"
        )
    return simulated_client_config(Path(simulated), context.node_config.get("partition-id"))
