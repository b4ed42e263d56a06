from skerry.cli import main

main()
