package node

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"slices"
	"strings"
	"testing"
	"time"
)

// image is an image of one layer.
type image struct {
	name       string
	entrypoint []string
	// Where files of this machine are in the image, by their path there.
	files map[string]string
	// Targets of symbolic links, by their path in the image.
	links map[string]string
}

// descriptor is a reference to a blob of an image, as the OCI's specification of images has it.
type descriptor struct {
	MediaType   string            `json:"mediaType"`
	Digest      string            `json:"digest"`
	Size        int               `json:"size"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

func describe(kind string, blob []byte) descriptor {
	return descriptor{MediaType: "application/vnd.oci.image." + kind, Digest: fmt.Sprintf("sha256:%x", sha256.Sum256(blob)), Size: len(blob)}
}

// write writes the image as a tar file that containerd imports, and returns its digest.
func (i image) write(t *testing.T, file string) string {
	t.Helper()
	layer := i.layer(t)
	layered := describe("layer.v1.tar", layer)
	config := encode(t, map[string]any{
		"architecture": "amd64",
		"os":           "linux",
		"created":      time.Unix(0, 0).UTC(),
		"config":       map[string]any{"Entrypoint": i.entrypoint, "Env": []string{"PATH=/usr/local/bin:/usr/bin:/bin"}},
		"rootfs":       map[string]any{"type": "layers", "diff_ids": []string{layered.Digest}},
	})
	manifest := encode(t, map[string]any{
		"schemaVersion": 2,
		"mediaType":     "application/vnd.oci.image.manifest.v1+json",
		"config":        describe("config.v1+json", config),
		"layers":        []descriptor{layered},
	})
	described := describe("manifest.v1+json", manifest)
	described.Annotations = map[string]string{"io.containerd.image.name": i.name}
	index := encode(t, map[string]any{"schemaVersion": 2, "manifests": []descriptor{described}})

	out, err := os.Create(file)
	must(t, i.name, err)
	defer out.Close()
	files := tar.NewWriter(out)
	put := func(name string, content []byte) {
		must(t, name, files.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(content))}))
		_, err := files.Write(content)
		must(t, name, err)
	}
	put("oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`))
	put("index.json", index)
	for _, blob := range [][]byte{layer, config, manifest} {
		put("blobs/sha256/"+fmt.Sprintf("%x", sha256.Sum256(blob)), blob)
	}
	must(t, file, files.Close())
	return described.Digest
}

// layer returns the files and links as a tar file, with the folders that they are in.
func (i image) layer(t *testing.T) []byte {
	t.Helper()
	buffer := &bytes.Buffer{}
	layer := tar.NewWriter(buffer)
	made := map[string]bool{".": true}
	var folder func(string, int64)
	folder = func(name string, mode int64) {
		if made[name] {
			return
		}
		folder(path.Dir(name), 0o755)
		made[name] = true
		must(t, name, layer.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: name + "/", Mode: mode}))
	}
	folder("tmp", 0o1777)
	// In one order, so that the image has the same digest on each machine.
	for _, name := range slices.Sorted(maps.Keys(i.files)) {
		source := i.files[name]
		content, err := os.ReadFile(source)
		must(t, source, err)
		name = strings.TrimPrefix(name, "/")
		folder(path.Dir(name), 0o755)
		must(t, name, layer.WriteHeader(&tar.Header{Name: name, Mode: 0o755, Size: int64(len(content))}))
		_, err = io.Copy(layer, bytes.NewReader(content))
		must(t, name, err)
	}
	for _, name := range slices.Sorted(maps.Keys(i.links)) {
		target := i.links[name]
		name = strings.TrimPrefix(name, "/")
		folder(path.Dir(name), 0o755)
		must(t, name, layer.WriteHeader(&tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: target}))
	}
	must(t, i.name, layer.Close())
	return buffer.Bytes()
}

func encode(t *testing.T, value any) []byte {
	t.Helper()
	text, err := json.Marshal(value)
	must(t, "JSON", err)
	return text
}
