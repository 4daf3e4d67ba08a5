"""python -m dspine_mlx"""

from dspine_mlx.cli import main

main()
