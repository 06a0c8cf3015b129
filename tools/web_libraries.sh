#!/bin/sh
# Takes the libraries of the web page from the npm registry into server/web/vendor: highlight.js and KaTeX.
# To change a version, change it here and run this again. It needs npm.
set -eu

HIGHLIGHT=11.12.0
KATEX=0.19.1
LANGUAGES="bash c cpp csharp css diff dockerfile go ini java javascript json kotlin lua makefile markdown php python r \
ruby rust shell sql swift typescript xml yaml"
# Bold and slanted variants of rare alphabets are left out. A browser derives them from the regular ones.
LEFT_OUT="Caligraphic-Bold|Fraktur-Bold|Main-BoldItalic|SansSerif-Bold|SansSerif-Italic"

vendor=$(cd "$(dirname "$0")/.." && pwd)/server/web/vendor
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
rm -rf "$vendor"
mkdir -p "$vendor/highlight/languages" "$vendor/katex/fonts"

cd "$work"
npm pack --silent "@highlightjs/cdn-assets@$HIGHLIGHT" "katex@$KATEX" >/dev/null
for archive in *.tgz; do mkdir "${archive%.tgz}"; tar -xzf "$archive" -C "${archive%.tgz}" --strip-components 1; done

cd "$work/highlightjs-cdn-assets-$HIGHLIGHT"
cp es/core.min.js "$vendor/highlight/core.js"
for language in $LANGUAGES; do cp "es/languages/$language.min.js" "$vendor/highlight/languages/$language.js"; done
cp LICENSE "$vendor/highlight/LICENSE.txt"

cd "$work/katex-$KATEX"
cp dist/katex.min.js "$vendor/katex/katex.js"
cp dist/fonts/*.woff2 "$vendor/katex/fonts"
ls "$vendor"/katex/fonts/* | grep -E "($LEFT_OUT)\.woff2" | xargs rm
sed -E "s/,url\([^)]*\.(woff|ttf)\) format\(\"[a-z]*\"\)//g; s/@font-face\{[^}]*($LEFT_OUT)\.woff2[^}]*\}//g" \
    dist/katex.min.css >"$vendor/katex/katex.css"
cp LICENSE "$vendor/katex/LICENSE.txt"
du -sh "$vendor"
