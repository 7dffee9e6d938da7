package chart

import (
	"encoding/base64"
	"encoding/xml"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

var version = regexp.MustCompile(`(?m)^version = "(.*)"`)

func cargoVersion(t *testing.T) string {
	t.Helper()
	return version.FindStringSubmatch(read(t, root+"/Cargo.toml"))[1]
}

// TestVersions checks that chart, image and program have the same version, and that image and release are built by the same compiler.
func TestVersions(t *testing.T) {
	cargo := cargoVersion(t)
	for _, line := range []string{"version: ", "appVersion: "} {
		if !strings.Contains(read(t, chart+"/Chart.yaml"), "\n"+line+cargo+"\n") {
			t.Errorf("Chart.yaml has no %s%s", line, cargo)
		}
	}
	if !strings.Contains(read(t, root+"/Dockerfile"), "\nARG VERSION="+cargo+"\n") {
		t.Errorf("the Dockerfile's VERSION is not %s", cargo)
	}
	rust := regexp.MustCompile(`channel = "(.*)"`).FindStringSubmatch(read(t, root+"/packaging/rust-toolchain.toml"))[1]
	if !strings.Contains(read(t, root+"/Dockerfile"), "/library/rust:"+rust+"-bookworm\n") {
		t.Errorf("the Dockerfile's Rust is not %s", rust)
	}
	image := renderMode(t, "daemonset").proxy.Spec.Containers[0].Image
	if image != "ghcr.io/rangecache/rangecache:"+cargo {
		t.Error(image)
	}
	digest := "sha256:" + strings.Repeat("a", 64)
	if image := renderMode(t, "daemonset", "--set", "image.digest="+digest).proxy.Spec.Containers[0].Image; image != "ghcr.io/rangecache/rangecache@"+digest {
		t.Error(image)
	}
}

// resolveLink checks that a link leads to a file of the repository in the chart's version, and to a heading of it.
func resolveLink(t *testing.T, where, link string) {
	t.Helper()
	file, found := strings.CutPrefix(link, "https://github.com/rangecache/rangecache/blob/v"+cargoVersion(t)+"/")
	if !found {
		t.Errorf("%s: %s does not lead to this version", where, link)
		return
	}
	file, fragment, hasFragment := strings.Cut(file, "#")
	text, err := os.ReadFile(filepath.Join(root, file))
	if err != nil {
		t.Errorf("%s: %s leads nowhere: %v", where, link, err)
		return
	}
	if hasFragment && !slices.ContainsFunc(strings.Split(string(text), "\n"), func(line string) bool {
		heading := strings.ToLower(strings.TrimSpace(strings.TrimLeft(line, "#")))
		return strings.HasPrefix(line, "#") && strings.ReplaceAll(anchorDrop.ReplaceAllString(heading, ""), " ", "-") == fragment
	}) {
		t.Errorf("%s: %s leads to no heading", where, link)
	}
}

var (
	pageLink   = regexp.MustCompile(`\]\(([^)]+)\)`)
	metaLink   = regexp.MustCompile(`https://github\.com/rangecache/rangecache/[^\s)]+`)
	anchorDrop = regexp.MustCompile(`[^a-z0-9 _-]`)
)

// TestPackageIsReadableAlone checks what is shown of a package without the repository: its README has no relative links, links lead
// to the documents of its version, and the index has an icon, the maintainers, changes and the image.
func TestPackageIsReadableAlone(t *testing.T) {
	links := 0
	for _, match := range pageLink.FindAllStringSubmatch(read(t, chart+"/README.md"), -1) {
		if link := match[1]; !strings.HasPrefix(link, "#") {
			resolveLink(t, "README.md", link)
			links++
		}
	}
	if links < 8 {
		t.Errorf("%d links in README.md", links)
	}
	var meta struct {
		Icon        string                       `json:"icon"`
		Maintainers []struct{ Name, URL string } `json:"maintainers"`
		Annotations map[string]string            `json:"annotations"`
	}
	must(t, "Chart.yaml", yaml.Unmarshal([]byte(read(t, chart+"/Chart.yaml")), &meta))
	encoded, isSvg := strings.CutPrefix(meta.Icon, "data:image/svg+xml;base64,")
	if icon, err := base64.StdEncoding.DecodeString(encoded); err != nil || !isSvg || xml.Unmarshal(icon, new(struct{ XMLName xml.Name })) != nil {
		t.Errorf("the icon is no drawing: %v", err)
	}
	if len(meta.Maintainers) == 0 || meta.Maintainers[0].Name == "" {
		t.Error("no maintainers")
	}
	var changes, images, others []struct{ Kind, Description, Name, Image, URL string }
	for name, into := range map[string]any{"changes": &changes, "images": &images, "links": &others} {
		text := meta.Annotations["artifacthub.io/"+name]
		must(t, name, yaml.Unmarshal([]byte(text), into))
		for _, link := range metaLink.FindAllString(text, -1) {
			if !strings.HasSuffix(link, "/issues") {
				resolveLink(t, name, link)
			}
		}
	}
	if len(changes) == 0 || changes[0].Kind == "" || changes[0].Description == "" || len(others) == 0 {
		t.Errorf("changes %v, links %v", changes, others)
	}
	if image := renderMode(t, "daemonset").proxy.Spec.Containers[0].Image; len(images) != 1 || images[0].Image != image {
		t.Errorf("images %v, not %s", images, image)
	}
}
