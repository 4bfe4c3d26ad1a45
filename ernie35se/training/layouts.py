"""A checkpoint made under one parallel layout, resumed under another: model and optimizer.

PaddleNLP names the files of a checkpoint after the ranks that wrote them. Under another layout it looks for other
names, and a single process reads the first file of several and drops the rest without a word. Here a checkpoint also
says how it was made (`layout.json`), and where that differs from the running layout, every array is put together from
all its pieces and cut anew (`conversion.py`); a piece that is nowhere to be found is an error.

    unified checkpoint     safetensors of whole arrays, read piece by piece as they are needed
    classic checkpoint     one file for each tensor, pipeline and sharding rank, read one after the other

Array names: `<state-dict name>` for a weight, `<state-dict name>/<kind>` for a part of the optimizer's state.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Set

import numpy as np
import paddle
import paddle.distributed as dist
from paddlenlp.trainer import Trainer
from paddlenlp.trainer.trainer import SCALER_NAME, SCHEDULER_NAME
from paddlenlp.trainer.unified_checkpoint.utils import FP32_MASTER, generate_base_static_name
from paddlenlp.utils.log import logger
from paddlenlp.utils.safetensors import fast_safe_open

from .. import conversion, parallel, weight_files
from ..modeling import CheckpointMixin

LAYOUT_FILE = "layout.json"
UNKNOWN = 0  # degree of a checkpoint that does not name it
MODEL_INDEX, OPTIMIZER_INDEX, MASTER_INDEX = (
    f"{part}.safetensors.index.json" for part in ("model", "optimizer", "master_weights")
)


@dataclasses.dataclass
class Layout:
    """How a run divides its work. `parameter_names`: weight suffix of a rank -> {state-dict name: Paddle's name}."""

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    sharding: int = 1
    stage: str = ""
    data: int = 1
    unified: bool = False
    parameter_names: Dict[str, Dict[str, str]] = dataclasses.field(default_factory=dict)

    @classmethod
    def of_run(cls, args, config) -> Layout:
        return cls(
            tensor=max(args.tensor_parallel_degree, 1),
            pipeline=max(args.pipeline_parallel_degree, 1),
            virtual=max(int(getattr(config, "virtual_pp_degree", 1) or 1), 1),
            sharding=max(args.sharding_parallel_degree, 1),
            stage=" ".join(option.value for option in args.sharding),
            data=max(args.data_parallel_degree, 1),
            unified=bool(args.unified_checkpoint),
        )

    @classmethod
    def of_checkpoint(cls, folder: Path) -> Optional[Layout]:
        """What `layout.json` says; of a unified checkpoint without one, as plain PaddleNLP's, that; else None."""
        path = folder / LAYOUT_FILE
        if path.is_file():
            try:
                return cls(**json.loads(path.read_text(encoding="utf-8")))
            except (ValueError, TypeError) as error:
                raise ValueError(
                    f"{path} does not say how the checkpoint was made ({error}); copy the checkpoint again, or resume "
                    "from another one"
                ) from None
        return cls(tensor=UNKNOWN, unified=True) if (folder / MODEL_INDEX).is_file() else None

    def reads_files_of(self, other: Layout) -> bool:
        """Whether PaddleNLP's own loading finds, under this layout, what was saved under the other."""
        parts = [dataclasses.astuple(layout)[:5] for layout in (self, other)]  # replicas make no difference
        return parts[0] == parts[1] and (self.unified or not other.unified)

    def describe(self) -> str:
        """The degrees above 1, in words."""
        if self.tensor == UNKNOWN:
            return "a layout that it does not name"
        words = [f"{name} {getattr(self, name)}" for name in ("tensor", "pipeline", "virtual", "sharding", "data")
                 if getattr(self, name) > 1]  # fmt: skip
        return ", ".join(words + [self.stage] * bool(self.stage)) or "one process"

    def suffixes(self) -> List[str]:
        """Of the classic weight files, tensor ranks of one stage together."""
        tensor = [f"tp{rank:02d}" for rank in range(self.tensor)] if self.tensor > 1 else [""]
        pipeline = [f"pp{rank:02d}" for rank in range(self.pipeline)] if self.pipeline > 1 else [""]
        return ["_".join(filter(None, (t, p))) for p in pipeline for t in tensor]


class AnyLayoutTrainer(Trainer):
    """PaddleNLP's Trainer, whose checkpoints can be resumed under another parallel layout."""

    def __init__(self, model=None, args=None, **kwargs):
        if args.world_size > 1 and args.unified_checkpoint:
            parallel.join_data_parallel_group(args.world_size)
        super().__init__(model=model, args=args, **kwargs)

    def _wrap_model(self, model, training=True):
        """Sharding stage 3 puts a weight together for calls of its own layer; the tied head uses another layer's."""
        if isinstance(model, CheckpointMixin) and model.config.tie_word_embeddings and not self._has_stages(model):
            model.lm_head.extra_parameters = [model.ernie.embed_tokens.weight]  # Paddle's name for such
        return super()._wrap_model(model, training)

    @staticmethod
    def _has_stages(model) -> bool:
        return isinstance(model, parallel.PipelineLayer)

    def _save_checkpoint(self, model, metrics=None) -> None:
        super()._save_checkpoint(model, metrics)
        layout = Layout.of_run(self.args, self.model.config)
        layout.parameter_names = self._names_on_all_ranks()
        if self.args.should_save:
            folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
            text = json.dumps(dataclasses.asdict(layout), indent=1) + "\n"
            (folder / LAYOUT_FILE).write_text(text, encoding="utf-8")

    def save_model(self, output_dir: Optional[str] = None, merge_tensor_parallel: bool = False) -> None:
        """PaddleNLP's merging gathers weights on the devices and leaves stages apart; here the files are merged."""
        super().save_model(output_dir, merge_tensor_parallel and not isinstance(self.model, CheckpointMixin))
        layout = Layout.of_run(self.args, self.model.config)
        in_pieces = layout.tensor * layout.pipeline > 1 and not layout.unified
        if merge_tensor_parallel and in_pieces and isinstance(self.model, CheckpointMixin):
            dist.barrier()
            if self.is_world_process_zero():
                self._merge_files(Path(output_dir or self.args.output_dir))
            dist.barrier()

    def _merge_files(self, folder: Path) -> None:
        try:
            pieces = weight_files.Folder(folder)
        except ValueError as error:  # machines with disks of their own: nothing is lost, it only stays in pieces
            logger.warning(f"The model stays in pieces, for tools/merge_tensor_parallel.py to merge: {error}")
            return
        weight_files.merge_folder(pieces, folder, self.model.config)
        for name in pieces.names:
            (folder / name).unlink()
        weight_files.copy_beside(folder, folder, weight_files.WHOLE_CONFIG)

    def _names_on_all_ranks(self) -> Dict[str, Dict[str, str]]:
        names = {name: value.name for name, value in self.model.state_dict().items()}
        mine = (self.args.weight_name_suffix or "", names)
        everyone = [mine]
        if self.args.world_size > 1:
            everyone = []
            dist.all_gather_object(everyone, mine)
        return dict(everyone)

    def _made_under_another(self, folder: Optional[str]) -> Optional[Layout]:
        """The checkpoint's layout where PaddleNLP could not read it under this run's, else None."""
        layout = Layout.of_checkpoint(Path(folder)) if folder else None
        if layout is None or Layout.of_run(self.args, self.model.config).reads_files_of(layout):
            return None
        if layout.tensor == UNKNOWN and self.args.unified_checkpoint and self.args.world_size > 1:
            return None  # several processes read it as a whole; one alone would read the first file only
        return layout

    def _pieces(self, folder: str, layout: Layout) -> Pieces:
        degree, rank = max(self.args.tensor_parallel_degree, 1), max(self.args.tensor_parallel_rank, 0)
        kind = UnifiedPieces if layout.unified else ClassicPieces
        return kind(Path(folder), layout, self.model.config, degree, rank)

    def _load_from_checkpoint(self, resume_from_checkpoint=None):
        """PaddleNLP's finds no files, or too few, where the layout has changed."""
        layout = self._made_under_another(resume_from_checkpoint)
        if layout is None:
            return super()._load_from_checkpoint(resume_from_checkpoint)
        now = Layout.of_run(self.args, self.model.config)
        logger.info(f"{resume_from_checkpoint} was made under {layout.describe()}; cuts it anew for {now.describe()}.")
        wanted = set(self.model.state_dict())
        self.model.set_state_dict(self._pieces(resume_from_checkpoint, layout).weights(wanted))

    def _load_optimizer_and_scheduler(self, checkpoint):
        """As `_load_from_checkpoint`."""
        layout = self._made_under_another(checkpoint)
        if layout is None:
            return super()._load_optimizer_and_scheduler(checkpoint)
        for which, name in ((layout, "The checkpoint's"), (Layout.of_run(self.args, self.model.config), "This run's")):
            if "stage3" in which.stage:
                raise ValueError(
                    f"{checkpoint} cannot be resumed: it was made under {layout.describe()}. {name} optimizer is in "
                    "slices (stage3), which fit the same layout only. Resume under the old layout, or start a new run "
                    "from the checkpoint's weights with --continue_training."
                )
        schedule = paddle.load(str(Path(checkpoint) / SCHEDULER_NAME))
        state = self._optimizer_state(self._pieces(checkpoint, layout))
        self.optimizer.set_state_dict({**state, "LR_Scheduler": schedule})
        self.lr_scheduler.set_state_dict(schedule)
        scaler = Path(checkpoint) / SCALER_NAME
        if self.do_grad_scaling and scaler.is_file():
            self.scaler.load_state_dict(paddle.load(str(scaler), return_numpy=True))

    def _optimizer_state(self, pieces: Pieces) -> Dict[str, Any]:
        """The state under the names that this run's optimizer uses."""
        parameters = {name: value for name, value in self.model.state_dict().items() if not value.stop_gradient}
        moments, masters = pieces.optimizer(set(parameters))
        lacking = sorted(set(parameters) - {name.partition("/")[0] for name in moments})
        if lacking:
            raise ValueError(f"{pieces.folder} has no optimizer state of {lacking[0]} ({len(lacking)} are missing).")
        state = {}
        for full_name, array in moments.items():
            name, _, kind = full_name.partition("/")
            parameter = parameters[name]
            with_master = masters and parameter.dtype != paddle.float32
            key = "_".join([parameter.name, *([FP32_MASTER] if with_master else []), kind])
            state[key] = _named(array, key)
        if masters:
            state["master_weights"] = {
                parameters[name].name: _named(array, f"{parameters[name].name}_{FP32_MASTER}")
                for name, array in masters.items()
                if parameters[name].dtype != paddle.float32
            }
        return state


def _named(array: np.ndarray, name: str) -> paddle.Tensor:
    tensor = paddle.to_tensor(array)
    tensor.name = name
    return tensor


# ---------------------------------------------------------------- reading


class Pieces:
    """The arrays of a checkpoint, cut for one tensor-parallel rank of another layout.

    Args:
        folder, layout: the checkpoint. config: the model's. degree, rank: how to cut.
    """

    def __init__(self, folder: Path, layout: Layout, config, degree: int, rank: int):
        self.folder, self.layout, self.config, self.degree, self.rank = folder, layout, config, degree, rank

    def weights(self, wanted: Set[str]) -> Dict[str, np.ndarray]:
        """State-dict name -> this rank's piece, for exactly the names in `wanted`.

        Raises:
            ValueError: one that the checkpoint lacks.
        """
        found = dict(self._weights(wanted))
        lacking = sorted(wanted - set(found))
        if lacking:
            raise ValueError(f"{self.folder} has no weight {lacking[0]} ({len(lacking)} are missing).")
        return found

    def cut(self, name: str, array) -> np.ndarray:
        """This rank's piece of a whole array; of one number for all, the number."""
        weight, _, kind = name.partition("/")
        if "pow_acc" in kind:
            return array[:]
        return conversion.split(weight, array, self.config, self.degree, self.rank)

    def _file(self, name: str) -> Path:
        path = self.folder / name
        if not path.is_file():
            raise ValueError(
                f"{path} is missing: a checkpoint made under {self.layout.describe()} needs the files of all ranks. "
                "On several machines with disks of their own, copy them together first."
            )
        return path


class UnifiedPieces(Pieces):
    """Of a unified checkpoint: whole arrays, spread over files."""

    def _weights(self, wanted):
        return self._read(MODEL_INDEX, lambda name: name in wanted)

    def optimizer(self, wanted):
        moments = dict(self._read(OPTIMIZER_INDEX, lambda name: name.partition("/")[0] in wanted))
        has_masters = (self.folder / MASTER_INDEX).is_file()
        return moments, dict(self._read(MASTER_INDEX, lambda name: name in wanted)) if has_masters else {}

    def _read(self, index: str, chosen: Callable[[str], bool]) -> Iterator:
        places: Dict[str, List[str]] = {}
        for name, file in json.loads(self._file(index).read_text(encoding="utf-8"))["weight_map"].items():
            if chosen(name):
                places.setdefault(file, []).append(name)
        for file, names in places.items():
            with fast_safe_open(str(self._file(file))) as arrays:
                for name in names:
                    yield name, self.cut(name, arrays.get_slice(name))


class ClassicPieces(Pieces):
    """Of a classic checkpoint: each rank's own arrays, in its own file."""

    def _weights(self, wanted):
        def read(suffix):
            content = paddle.load(str(self._file(_variant("model_state.pdparams", suffix))), return_numpy=True)
            return {name: array for name, array in content.items() if name in wanted}

        return self._merged(read)

    def optimizer(self, wanted):
        moments = dict(self._merged(lambda suffix: self._optimizer_of(suffix, wanted)[0]))
        return moments, dict(self._merged(lambda suffix: self._optimizer_of(suffix, wanted)[1]))

    def _merged(self, read: Callable[[str], Dict[str, np.ndarray]]) -> Iterator:
        """(name, this rank's piece), from the ranks of each stage together."""
        suffixes, tensor = self.layout.suffixes(), self.layout.tensor
        for start in range(0, len(suffixes), tensor):
            shards = [read(suffix) for suffix in suffixes[start : start + tensor]]
            for name in list(shards[0]):
                pieces = [shard.pop(name) for shard in shards]
                weight, _, kind = name.partition("/")
                whole = pieces[0] if "pow_acc" in kind else conversion.merge(weight, pieces, self.config)
                yield name, self.cut(name, whole)

    def _optimizer_of(self, suffix: str, wanted: Set[str]):
        """Moments and master weights of one weight file's ranks: the sharding ranks' parts joined."""
        own = {paddle_name: name for name, paddle_name in self.layout.parameter_names[suffix].items()}
        moments, masters = {}, {}
        for shard in range(self.layout.sharding):
            part = f"shard{shard:02d}" if self.layout.sharding > 1 else ""
            file = self._file(_variant("optimizer.pdopt", "_".join(filter(None, (suffix, part)))))
            for key, value in paddle.load(str(file), return_numpy=True).items():
                if key == "master_weights":
                    masters.update({own[name]: array for name, array in value.items() if own[name] in wanted})
                elif key != "LR_Scheduler":
                    paddle_name, kind = generate_base_static_name(key)
                    if own[paddle_name] in wanted:
                        moments[f"{own[paddle_name]}/{kind}"] = value
        return moments, masters


def _variant(name: str, suffix: str) -> str:
    stem, _, extension = name.rpartition(".")
    return f"{stem}.{suffix}.{extension}" if suffix else name
