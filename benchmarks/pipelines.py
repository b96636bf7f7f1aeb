"""Programs of several networks, quantized together: reading text from pictures, and a diffusion pipeline.

    python benchmarks/pipelines.py ocr --models FOLDER    # with ch_PP-OCRv4_det_infer.onnx and ch_PP-OCRv4_rec_infer.onnx in it
    python benchmarks/pipelines.py diffusion

`ocr` is PaddleOCR's detector and recogniser as ONNX files, which the wheel rapidocr-onnxruntime holds (Apache-2.0), on lines of
text that are drawn here; `diffusion` a text encoder of transformers, a U-Net and a decoder of diffusers, tiny, with random
weights. Results: benchmarks/results/pipelines.md.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np

import bitwright

WORDS = "invoice total price street number garden window summer paper letter coffee engine river market doctor".split()


def picture(seed: int) -> np.ndarray[Any, Any]:
    """Two lines of words and numbers, black on a light ground, [128, 320, 3] uint8."""
    from PIL import Image, ImageDraw, ImageFont

    rng = np.random.default_rng(seed)
    image = Image.new("RGB", (320, 128), tuple(int(x) for x in rng.integers(200, 256, 3)))
    pen, font = ImageDraw.Draw(image), ImageFont.load_default(size=24)
    for y in (18, 74):
        line = f"{rng.choice(WORDS)} {rng.choice(WORDS)} {rng.integers(10, 999)}"
        pen.text((int(rng.integers(8, 20)), y), line, fill=tuple(int(x) for x in rng.integers(0, 90, 3)), font=font)
    return np.asarray(image)


def read(networks: Any, image: np.ndarray[Any, Any]) -> dict[str, Any]:
    """The lines of a picture: where the detector sees text, and what the recogniser reads there."""
    from PIL import Image
    from scipy import ndimage

    normal = (image.astype(np.float32) / 255 - (0.485, 0.456, 0.406)) / (0.229, 0.224, 0.225)
    detector, recogniser = networks["detector"], networks["recogniser"]
    feeds = {detector.get_inputs()[0].name: normal.transpose(2, 0, 1)[None].astype(np.float32)}
    heat = detector.run(None, feeds)[0]
    parts, _ = ndimage.label(heat[0, 0] > 0.3)
    letters = ["", *recogniser.get_modelmeta().custom_metadata_map["character"].splitlines(), " "]
    lines = []
    for rows, columns in ndimage.find_objects(parts):
        if (rows.stop - rows.start) * (columns.stop - columns.start) < 200:
            continue
        more = (rows.stop - rows.start) // 2
        top, left = max(rows.start - more, 0), max(columns.start - more, 0)
        crop = Image.fromarray(image[top : rows.stop + more, left : columns.stop + more]).resize((320, 48))
        given = ((np.asarray(crop, np.float32) / 255 - 0.5) / 0.5).transpose(2, 0, 1)[None]
        best = recogniser.run(None, {recogniser.get_inputs()[0].name: given})[0][0].argmax(-1)
        lines.append("".join(letters[k] for i, k in enumerate(best) if k and (i == 0 or best[i - 1] != k)))
    return {"heat": heat, "text": " / ".join(lines)}


def ocr(models: Path, out: Path | None) -> None:
    networks = {"detector": models / "ch_PP-OCRv4_det_infer.onnx", "recogniser": models / "ch_PP-OCRv4_rec_infer.onnx"}
    pictures = [picture(seed) for seed in range(10)]
    result = bitwright.quantize_pipeline(networks, read, pictures, path=out)
    print(result)
    for one in pictures[-2:]:
        print(result.run(one)["text"])


def diffusion(out: Path | None) -> None:
    import torch
    from diffusers import AutoencoderKL, DDIMScheduler, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 100,
    }
    text = CLIPTextModel(CLIPTextConfig(**sizes, max_position_embeddings=8, bos_token_id=1, eos_token_id=2)).eval()
    blocks = {
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    }
    unet = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        cross_attention_dim=32,
        attention_head_dim=8,
        **blocks,
    ).eval()
    vae = AutoencoderKL(block_out_channels=(32,), latent_channels=4, norm_num_groups=8).eval()
    scheduler = DDIMScheduler()

    def run(networks: Any, prompt: torch.Tensor) -> Any:
        with torch.no_grad():
            scheduler.set_timesteps(8)
            states = text(input_ids=prompt).last_hidden_state
            x = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
            for step in scheduler.timesteps:
                noise = unet(x, step, encoder_hidden_states=states).sample
                x = scheduler.step(noise, step, x).prev_sample
            return {"image": vae.decoder(x)}

    prompts = [torch.randint(3, 100, (1, 8), generator=torch.Generator().manual_seed(seed)) for seed in range(10)]
    networks = {"text_encoder": text, "unet": unet, "decoder": vae.decoder}
    print(bitwright.quantize_pipeline(networks, run, prompts, path=out))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", choices=("ocr", "diffusion"))
    parser.add_argument("--models", type=Path, default=Path("."), help="folder of the two ONNX files of `ocr`")
    parser.add_argument("--out", type=Path, help="export there")
    given = parser.parse_args()
    begun = time.process_time()
    if given.program == "ocr":
        ocr(given.models, given.out)
    else:
        diffusion(given.out)
    print(f"{time.process_time() - begun:.0f} CPU seconds")


if __name__ == "__main__":
    main()
