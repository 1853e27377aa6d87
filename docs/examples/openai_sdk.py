"""One clip with the OpenAI SDK: `OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=- python openai_sdk.py`."""

from openai import OpenAI

client = OpenAI()
video = client.videos.create_and_poll(prompt="a red ball rolls over grass", seconds="4")
if video.status != "completed":
    raise SystemExit(f"{video.id} is {video.status}: {video.error and video.error.message}")
client.videos.download_content(video.id).write_to_file(f"{video.id}.mp4")
print(f"{video.id}.mp4", video.size, video.seconds)
