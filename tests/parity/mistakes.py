"""Known mistakes, each as a change of the library, the parameters or the inputs, and how large its error is."""

from __future__ import annotations

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from convert import check_parity
from mage_jax.model import decoder, mage_vl, vision


def replaced(**changes):
    """Sabotage by config: fields of the vision or text part."""

    def install(patch):
        load = check_parity.load_model

        def wrong(*args, **kwargs):
            model = load(*args, **kwargs)
            config = dataclasses.replace(
                model.config,
                **{
                    part: dataclasses.replace(getattr(model.config, part), **fields) for part, fields in changes.items()
                },
            )
            return dataclasses.replace(model, config=config)

        patch(check_parity, "load_model", wrong)

    return install


def around(name, change):
    """Sabotage of one function that ``forward`` calls: ``change(original)`` takes its place."""
    return lambda patch: patch(mage_vl, name, change(getattr(mage_vl, name)))


def with_gelu(gelu):
    """Another activation, while one tower is traced only."""

    def change(original):
        def wrong(*args, **kwargs):
            with mock.patch.object(jax.nn, "gelu", gelu):
                return original(*args, **kwargs)

        return wrong

    return change


def with_eps(eps):
    """Another epsilon in one of the two parts that share the config's."""

    def change(original):
        def wrong(*args, config, **kwargs):
            return original(*args, config=dataclasses.replace(config, layer_norm_eps=eps), **kwargs)

        return wrong

    return change


def tanh_gelu(x, approximate=False):
    return 0.5 * x * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def quick_gelu(x, approximate=False):
    return x * jax.nn.sigmoid(1.702 * x)


def half_split(x, angles):
    cos, sin = jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]
    first, second = jnp.split(x, 2, axis=-1)
    return x * cos + jnp.concatenate([-second, first], axis=-1) * sin


def equal_angle_pairs(x, angles):
    """The textbook's interleaved form: a pair shares the angle."""
    half = angles[..., : angles.shape[-1] // 2]
    cos, sin = jnp.cos(half)[:, :, None], jnp.sin(half)[:, :, None]
    a, b = x[..., 0::2], x[..., 1::2]
    return jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x.shape)


def doubled_exponent(positions, *, head_dim, theta):
    unit, parts = head_dim // 32, []
    for axis, size in enumerate((4 * unit, 6 * unit, 6 * unit)):
        parts.append(positions[..., axis, None] * theta ** (-2.0 * np.arange(size) / size))
    half = jnp.concatenate(parts, axis=-1).astype(jnp.float32)
    return jnp.concatenate([half, half], axis=-1)


def tiled_gqa(original):
    """Query head j reads key head j modulo their number."""

    def wrong(q, k, v, *, causal, **kwargs):
        times = q.shape[2] // k.shape[2]
        return original(q, jnp.tile(k, (1, 1, times, 1)), jnp.tile(v, (1, 1, times, 1)), causal=causal, **kwargs)

    return wrong


def add_instead(original):
    def wrong(params, rows, **kwargs):
        embeds, seen = original(params, rows, **kwargs)
        own = params["text"]["embed_vd"][rows.tokens_bt]
        embeds = embeds + jnp.where((rows.vision_index_bt >= 0)[..., None], own, 0)
        return embeds, seen | {"inputs_embeds": embeds}

    return wrong


def no_head_norm(patch):
    norm = decoder.rms_norm
    patch(decoder, "rms_norm", lambda x, scale, *, eps: x if x.ndim == 4 else norm(x, scale, eps=eps))


def head_norm_after_rotation(patch):
    """The norm that comes first is put off until the rotation is done."""
    norm, rotate, scales = decoder.rms_norm, decoder.rotate_half_split, []

    def put_off(x, scale, *, eps):
        if x.ndim < 4:
            return norm(x, scale, eps=eps)
        scales.append((scale, eps))
        return x

    def rotate_then_norm(x, angles):
        scale, eps = scales.pop()
        return norm(rotate(x, angles), scale, eps=eps)

    patch(decoder, "rms_norm", put_off)
    patch(decoder, "rotate_half_split", rotate_then_norm)


def changed_params(change):
    def install(patch):
        load = check_parity.load_model

        def wrong(*args, **kwargs):
            model = load(*args, **kwargs)
            params = change(jax.tree.map(np.array, model.params))
            # Placed like the loaded ones, or every operation would be compiled again.
            params = jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), params, model.params)
            return dataclasses.replace(model, params=params)

        patch(check_parity, "load_model", wrong)

    return install


def per_head_qkv(params):
    """Rows read as (head, part) instead of (part, head), as another trainer stores them."""
    attn = params["vision"]["layers"]["attn"]
    for name in ("qkv_cnhd", "qkv_bias_cnh"):
        layers, parts, heads, *rest = attn[name].shape
        attn[name] = np.swapaxes(attn[name].reshape(layers, heads, parts, *rest), 1, 2)
    return params


def pixels_channel_last(params):
    kernel = params["vision"]["patch_embed_dcyx"]
    d, c, y, x = kernel.shape
    params["vision"]["patch_embed_dcyx"] = kernel.transpose(0, 2, 3, 1).reshape(d, c, y, x)
    return params


def one_layer_less(params):
    """The tap before the last block: a block that adds nothing."""
    layers = params["vision"]["layers"]
    for weight in (layers["attn"]["proj_dnh"], layers["attn"]["proj_bias_d"]):
        weight[-1] = 0
    for weight in (layers["mlp"]["fc2_df"], layers["mlp"]["fc2_bias_d"]):
        weight[-1] = 0
    return params


def changed_rows(change):
    def install(patch):
        convert = check_parity.from_hf_inputs

        def wrong(inputs, **kwargs):
            case = convert(inputs, **kwargs)
            return dataclasses.replace(case, rows=case.rows.replace(**change(case.rows, inputs)))

        patch(check_parity, "from_hf_inputs", wrong)

    return install


def images_reversed(rows, inputs):
    """The last picture's features go to the first place of a picture."""
    counts = inputs["image_grid_thw"].prod(axis=1) // 4
    ends = np.cumsum(counts)
    order = np.concatenate([np.arange(end - n, end) for n, end in zip(counts[::-1], ends[::-1], strict=True)])
    index = rows.vision_index_bt.copy()
    index[index >= 0] = order
    return {"vision_index_bt": index}


def one_window(rows, inputs):
    return {"patch_windows_bp": np.minimum(rows.patch_windows_bp, 1)}


def no_segments(rows, inputs):
    return {"segment_ids_bt": np.minimum(rows.segment_ids_bt, 1)}


def row_major_positions(rows, inputs):
    return {"patch_positions_bp3": inputs["patch_positions_rowmajor"][None].astype(np.int32)}


def column_major_blocks(rows, inputs):
    """Inside each block, down before right."""
    swap = lambda x: x.reshape(1, -1, 4, x.shape[-1])[:, :, [0, 2, 1, 3]].reshape(x.shape)
    return {"patches_bpc": swap(rows.patches_bpc), "patch_positions_bp3": swap(rows.patch_positions_bp3)}


def time_as(times):
    def change(rows, inputs):
        positions = rows.patch_positions_bp3.copy()
        positions[..., 0] = times(positions[0, :, 0])
        return {"patch_positions_bp3": positions}

    return change


def no_pre_norm(patch):
    """The first norm of the tower is the one over its input."""
    norm, calls = vision.layer_norm, []

    def wrong(x, *args, **kwargs):
        calls.append(1)
        return x if len(calls) == 1 else norm(x, *args, **kwargs)

    patch(vision, "layer_norm", wrong)


def norm_after_concatenation(original):
    """One set of statistics for the four patches of a block."""

    def wrong(params, x, *, config):
        block = x.reshape(*x.shape[:1], -1, config.merged_size)
        wide = {name: jnp.tile(value, config.merge_factor) for name, value in params["norm"].items()}
        normed = vision.layer_norm(block, **wide, eps=config.layer_norm_eps).reshape(x.shape)
        with mock.patch.object(vision, "layer_norm", lambda x, **kwargs: x):
            return original(params, normed, config=config)

    return wrong


def stray_post_norm(original):
    def wrong(*args, config, **kwargs):
        x, seen = original(*args, config=config, **kwargs)
        one = jnp.ones(x.shape[-1])
        return vision.layer_norm(x, scale_d=one, bias_d=0 * one, eps=config.layer_norm_eps), seen

    return wrong


def scale_from_width(original):
    """Scores divided by the root of hidden / heads (16 here) where the head has 32."""
    return lambda q, *args, **kwargs: original(q * np.sqrt(q.shape[-1] / 16), *args, **kwargs)


# The case that shows a mistake, and the smallest error of the logits to expect there. Stated errors are maxima over
# more cases than are stored, so some floors lie below them; every one lies above the tolerance.
SABOTAGE = {
    "vision epsilon 1e-5": ("G_video", 1e-3, around("encode_patches", with_eps(1e-5))),
    "merger epsilon 1e-5": ("G_video", 4e-4, around("merge_patches", with_eps(1e-5))),
    "text epsilon 1e-5": ("G_video", 2e-3, replaced(text={"rms_norm_eps": 1e-5})),
    "tanh GELU in the tower": ("G_video", 5e-4, around("encode_patches", with_gelu(tanh_gelu))),
    "tanh GELU in the merger": ("G_video", 5e-4, around("merge_patches", with_gelu(tanh_gelu))),
    "quick GELU in the tower": ("G_video", 2e-2, around("encode_patches", with_gelu(quick_gelu))),
    "half-split rotation in the tower": ("G_video", 0.5, lambda patch: patch(vision, "rotate_interleaved", half_split)),
    "equal angles in a pair": ("G_video", 0.5, lambda patch: patch(vision, "rotate_interleaved", equal_angle_pairs)),
    "exponent 2i/n": ("G_video", 0.5, lambda patch: patch(vision, "vision_angles", doubled_exponent)),
    "positions row-major": ("G_video", 0.5, changed_rows(row_major_positions)),
    "t = 0": ("G_video", 0.5, changed_rows(time_as(np.zeros_like))),
    "t counted without gaps": ("G_video", 0.5, changed_rows(time_as(lambda t: np.unique(t, return_inverse=True)[1]))),
    "no frame windows": ("G_video", 0.5, replaced(vision={"frame_window_size": 1_000})),
    "images attend to each other": ("C_multi", 0.5, changed_rows(one_window)),
    "image order reversed": ("C_multi", 0.5, changed_rows(images_reversed)),
    "qkv rows by head": ("G_video", 0.5, changed_params(per_head_qkv)),
    "tap before the last block": ("G_video", 0.5, changed_params(one_layer_less)),
    "pixels (y, x, channel)": ("G_video", 0.5, changed_params(pixels_channel_last)),
    "blocks column-major": ("G_video", 0.5, changed_rows(column_major_blocks)),
    "norm after concatenation": ("G_video", 0.2, around("merge_patches", norm_after_concatenation)),
    "no norm before the blocks": ("G_video", 0.5, no_pre_norm),
    "a norm after the blocks": ("G_video", 2e-4, around("encode_patches", stray_post_norm)),
    "added instead of replaced": ("G_video", 0.2, around("embed_rows", add_instead)),
    "no norm of queries and keys": ("G_video", 0.5, no_head_norm),
    "norm of queries and keys after rotation": ("G_video", 0.5, head_norm_after_rotation),
    "rope base 1e6": ("G_video", 0.5, replaced(text={"rope_theta": 1e6})),
    "key heads tiled": ("G_video", 0.5, around("attention", tiled_gqa)),
    "scale from the width": ("G_video", 0.5, around("attention", scale_from_width)),
    "no segment mask": ("P_packing", 0.5, changed_rows(no_segments)),
}
